"""What is imported when, and from where; what is said if a package is missing; and copies of the package elsewhere."""

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts._base.extras import require_package
from ppo_parts.bridges import tunix
from ppo_parts.commands import compare, export
from ppo_parts.envs._registry import SOURCES, deferred
from ppo_parts.errors import MissingPackage

ROOT = Path(__file__).parents[1]
PACKAGE = Path(pp.__file__).parent
OPTIONAL = {"brax", "chex", "craftax", "distrax", "flax", "gymnax", "gymnasium", "jaxmarl", "jumanji", "matplotlib"}
OPTIONAL |= {"mujoco_playground", "optuna", "orbax", "pgx", "ray", "tensorboardX", "tqdm", "tunix", "tyro", "xminigrid"}


def python(source: str, folder: Path) -> str:
    """Return what a fresh interpreter prints when it runs `source` in `folder`."""
    done = subprocess.run([sys.executable, "-c", source], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_takes_no_optional_package_and_starts_no_backend():
    source = f"""
import sys, jax, optax
from jax._src import xla_bridge
before = [name for name in {OPTIONAL} if name in sys.modules]  # optax itself imported chex once
import ppo_parts.distributions, ppo_parts.envs, ppo_parts.networks, ppo_parts.training
ppo_parts.networks.orthogonal, ppo_parts.networks.action_distribution  # the others are of flax
print([name for name in {OPTIONAL} if name in sys.modules and name not in before], list(xla_bridge._backends))
"""
    made, drawing = importlib.util.find_spec("gymnax"), ("scipy.stats", "seaborn", "matplotlib.pyplot", "pandas")
    if made:  # make an environment of gymnax without importing the libraries that draw it
        source += f"ppo_parts.envs.make('CartPole-v1'); print([name for name in {drawing} if name in sys.modules])"
    assert python(source, ROOT).split("\n") == ["[] []", *(["[]"] if made else [])]


def test_the_core_depends_on_jax_and_optax_and_the_citation_and_each_extra_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [requirement.partition(">=")[0] for requirement in project["dependencies"]] == ["jax", "optax"]
    programs = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = {*re.findall(r'require_package\("[\w.]+", "(\w+)"\)', programs), *(x.extra for x in SOURCES.values())}
    assert {"train", "track", "ray", "brax"} <= named <= project["optional-dependencies"].keys()
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == pp.__version__


USES = [  # a package, its extra, and what needs it
    ("gymnax", "envs", lambda folder: envs.make("CartPole-v1")),
    *((source.package.partition(".")[0], source.extra, lambda folder, name=f"{prefix}:any": envs.make(name))
      for prefix, source in SOURCES.items() if source.package != "jax"),
    ("flax", "train", lambda folder: networks.actor_critic),
    ("orbax", "train", lambda folder: training.Checkpoints(folder)),
    ("tunix", "tunix", lambda folder: tunix.register()),
    ("optuna", "optuna", lambda folder: training.objective(lambda config: None, None, {})),
    ("jax2onnx", "export", lambda folder: export.to_onnx(None, None)),
    ("matplotlib", "train", lambda folder: compare.plot_curves(folder / "a.png", [compare.Curve("", "", 0, 0)])),
]  # fmt: skip


@pytest.mark.parametrize(("package", "extra", "use"), USES)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(package, extra, use, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=rf'{package} is not installed: .* pip install "ppo_parts\[{extra}\]"'):
        use(tmp_path)


def test_a_missing_package_is_named_on_a_command_line_and_inside_another_package(monkeypatch, tmp_path):
    def make_train(config: training.Config): ...

    monkeypatch.setitem(sys.modules, "tyro", None)
    config = training.Config(env_id="CartPole-v1", total_timesteps=1, num_envs=1, num_steps=1)
    says = r'^error: tyro is not installed: install it with pip install "ppo_parts\[train\]"'
    with pytest.raises(SystemExit, match=says):
        training.main(make_train, {"default": config}, [])
    (tmp_path / "half_installed.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    says = r"half_installed needs no_such_dependency, which is not installed: .*\[envs\]"
    with pytest.raises(ImportError, match=says):
        require_package("half_installed", "envs")


USE = """
import importlib.metadata as metadata
found = metadata.Distribution.from_name
def from_name(name):
    if name == "ppo_parts":  # as if it were not installed
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.Distribution.from_name = from_name
import jax, jax.numpy as jnp, optax, sys
import mylib.ppo_parts as pp, mylib.ppo_parts.envs, mylib.ppo_parts.networks
from mylib.ppo_parts import testing, training
batch, context = testing.example_batch(), testing.example_context()
pipeline = pp.chain(pp.gae(gamma=.9, gae_lambda=.9), pp.full_batch(), pp.clipped_surrogate(clip_eps=.2),
                    pp.value_loss())
learner = pp.learner(context.evaluate, pipeline, optax.sgd(.1))
state, _ = jax.jit(learner.update)(jax.random.key(0), learner.init(context.params), batch)
moved = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), state.params, context.params)
print(all(jax.tree.leaves(moved)), "ppo_parts" in sys.modules, pp.__version__, training.read_versions()["ppo_parts"])
import ppo_parts  # beside it
"""


def test_a_copy_works_inside_another_package(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "mylib/ppo_parts", ignore=shutil.ignore_patterns("__pycache__"))
    assert python(USE, tmp_path).split() == ["True", "False", pp.__version__, pp.__version__]


def test_a_deferred_module_is_imported_when_it_is_used(tmp_path, monkeypatch, capsys):
    (tmp_path / "drawing_library.py").write_text("print('imported')\nred = 'r'")
    (tmp_path / "an_environment.py").write_text("import drawing_library\ndef draw(): return drawing_library.red")
    (tmp_path / "an_eager_one.py").write_text("import drawing_library\ncolor = drawing_library.red")
    monkeypatch.syspath_prepend(tmp_path)
    with deferred("drawing_library"):
        environment = importlib.import_module("an_environment")
    assert "drawing_library" not in sys.modules
    assert [environment.draw(), environment.draw()] == ["r", "r"]
    assert capsys.readouterr().out == "imported\n"
    del sys.modules["drawing_library"]
    with deferred("drawing_library"):
        assert importlib.import_module("an_eager_one").color == "r"
    assert capsys.readouterr().out == "imported\n"
    for name in ("drawing_library", "an_environment", "an_eager_one"):
        del sys.modules[name]


# --- direction of imports: a folder of the package imports only from those before it ----------------------------------

FLOORS = [
    {"functional"}, {"errors"}, {"_base"}, {"distributions"}, {"_core"}, {"_parts", "envs"},
    {"tokens", "exploration", "critics", "regularizers", "symmetry", "agents", "optim"}, {"__init__"},
    {"networks", "bridges"}, {"training"}, {"commands"},
    {"evaluate", "watch", "compare", "export", "doctor", "recipes"}, {"testing"},
]  # fmt: skip
DOCSTRING = re.compile(r'^ *""".*?"""', re.MULTILINE | re.DOTALL)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> set[str]:
    found = re.findall(r"^ *from (\.+)(\w*)[\w.]* import (\w+)", path.read_text(), re.MULTILINE)
    depth = len(path.relative_to(PACKAGE).parts)
    rooms = {module or name for dots, module, name in found if len(dots) == depth}
    return {room if room in FLOOR else "__init__" for room in rooms}


def test_imports_point_to_the_left():
    recipes = {*PACKAGE.glob("recipes/**/*.py")}  # recipes are programs, which users may copy
    paths = sorted(PACKAGE.rglob("*.py"))
    assert {room_of(path) for path in paths} <= FLOOR.keys()
    for path in paths:
        to_the_right = [x for x in rooms_imported(path) - {room_of(path)} if FLOOR[x] >= FLOOR[room_of(path)]]
        assert to_the_right == [], path
        names = re.findall(r"^ *(?:from|import) +(ppo_parts)\b", DOCSTRING.sub("", path.read_text()), re.MULTILINE)
        assert path in recipes or names == [], path


def test_benchmarks_import_no_other_benchmark():
    """They import only what they share and the programs that they train, both of which the folder's docstring names."""
    texts = {path.stem: path.read_text() for path in (PACKAGE.parent / "benchmarks").glob("*.py")}
    pages = {"report", "_tables", "_figures"}  # they read the tables of benchmarks
    shared = {name for name in texts if name.startswith("_")} - pages
    benchmarks = {name for name, text in texts.items() if "\ndef main()" in text} - shared - pages
    programs = texts.keys() - shared - benchmarks - pages
    for name in texts.keys() - pages:
        found = re.findall(r"^ *from \.(\w*) import (.+)", texts[name], re.MULTILINE)
        assert not re.search(r"^ *from \.\w* import \($|^ *(?:from|import) benchmarks", texts[name], re.MULTILINE), name
        imported = {x for module, names in found for x in ([module] if module else names.split(", "))}
        assert imported <= (shared | programs if name in benchmarks else shared), name
    assert [name for name in programs | shared if name[:2] != "__" and f"`{name}`" not in texts["__init__"]] == []
