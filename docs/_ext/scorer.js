// How search orders its results: by how many words of the question are in the headings of a page, and explanations before
// records. Sphinx puts this into its own script in place of the defaults, which the numbers are.
var Scorer = {
  score: ([docname, , , , score, , kind]) => {
    const places = [[/^docs\/(decisions|fidelity|benchmarks)/, -6], [/README$|^docs\/(index|reference)$/, -4], [/generated/, -2]];
    const place = places.find(([pattern]) => pattern.test(docname))?.[1] ?? 0;
    if (kind !== SearchResultKind.text) return score + place;
    const { docnames, titles, titleterms } = Search._index;
    const page = docnames.indexOf(docname);
    const title = titles[page].toLowerCase();
    const words = [...Search._parseQuery(new URLSearchParams(location.search).get("q"))[1]];
    const inTitle = words.filter((word) => title.includes(word));
    const inHeadings = words.filter((word) => inTitle.includes(word) || [titleterms[word] ?? []].flat().includes(page));
    return Scorer.term + 10 * inHeadings.length + 5 * inTitle.length + place;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
