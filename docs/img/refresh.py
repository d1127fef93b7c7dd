"""Draws refresh.png: what is computed when in one update of two epochs with three minibatches each.

python docs/img/refresh.py
"""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLORS = {"policy": "#9db8d9", "advantage": "#f2b56b", "draw": "#c9c9c9", "step": "#8cc08a", "write": "#d98c8c"}
WIDTHS = {"policy": 1.5, "advantage": 0.75, "draw": 0.45, "step": 0.75, "write": 0.45}
LEGEND = {
    "policy": "policy evaluated on the whole rollout",
    "advantage": "advantages (and priorities) of the whole rollout",
    "draw": "minibatch drawn",
    "step": "policy evaluated on it, gradient step",
    "write": "its values and log-ratios written back",
}


def events(refresh: str) -> list[str]:
    """The order of events in one update."""
    order = ["advantage"] if refresh == "rollout" else []
    for epoch in range(2):
        if refresh == "epoch":
            order += ["policy"] * (epoch > 0) + ["advantage"]
        for _ in range(3):
            if refresh == "minibatch":
                order += ["advantage", "draw", "step", "write"]
            else:
                order += ["draw", "step"]
    return order


def main() -> None:
    """Draw."""
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, refresh in enumerate(("rollout", "epoch", "minibatch")):
        at = 0.0
        for event in events(refresh):
            axes.barh(row, WIDTHS[event] - 0.06, left=at, height=0.55, color=COLORS[event])
            at += WIDTHS[event]
    for event, text in LEGEND.items():
        axes.barh(0, 0, color=COLORS[event], label=text)
    axes.set_yticks(range(3), [f'refresh="{r}"' for r in ("rollout", "epoch", "minibatch")], family="monospace")
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlabel("order of work in one update of two epochs with three minibatches each (lengths are not measured)")
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(length=0)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
