"""The pictures of docs/results.md and docs/accuracy.md, drawn by `thinwire report` from kept runs; needs matplotlib.

python benchmarks/claims_figures.py [DIR]    # docs/figures unless told
"""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parent))

from claims import method_of
from comparing import RESULTS
from kept_runs import write_folder

R20 = ("r20f-balanced", "r20f-bf16", "r20f-dense", "r20f-dgc")
VGG = ("vgg-dense", "vgg-balanced", "vgg-head", "vgg-0.02", "vgg-gtopk-0.03", "vgg-powersgd-4")

# A picture's name, the chart of the report that it is, and the runs in it, all seeds of each.
PICTURES = (
    ("resnet20-bytes", "metric-bytes", R20),
    ("resnet20-steps", "metric-step", R20),
    ("resnet20-8-workers-steps", "metric-step", ("r20x8-short-dense", "r20x8-balanced", "r20x8-gtopk-0.03")),
    ("resnet110-steps", "metric-step", ("r110-warm-dense", "r110-balanced", "r110-warm-masked")),
    ("vgg16-loss", "loss-step", VGG),
    ("vgg16-bytes", "metric-bytes", VGG),
    ("ptb-bytes", "metric-bytes", ("ptb-balanced", "ptb-dense", "ptb-dgc", "ptb-gtopk-0.03")),
    (
        "multi30k-steps",
        "metric-step",
        ("m30k-dense", "m30k-partial-0.03", "m30k-int8", "m30k-partial", "m30k-dropping"),
    ),
    ("multi30k-gru-steps", "metric-step", ("m30k-gru-long-dense", "m30k-gru-long-int8")),
    ("blocksign-steps", "metric-step", ("r20x8l-ours", "r20x8l-dense")),
)


def kept(runs: str) -> list[Path]:
    """All seeds of a name, in order."""
    found = [path for path in sorted(RESULTS.glob("*.json")) if fnmatchcase(path.stem, f"{runs}-s?")]
    if not found:
        sys.exit(f"claims_figures: no run of '{runs}' is kept in {RESULTS}")
    return found


def draw(chart: str, runs: tuple[str, ...], picture: Path) -> None:
    """One chart of the report of these runs."""
    with TemporaryDirectory() as workspace:
        folder = Path(workspace)
        inputs = [write_folder(path, folder, method_of(path.stem)) for name in runs for path in kept(name)]
        command = [sys.executable, "-m", "thinwire", "report", *map(str, inputs)]
        command += ["--out", str(folder / "report.html"), "--figures", str(folder / "figures")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (drawn,) = (folder / "figures").glob(f"*-{chart}.svg")
        picture.write_bytes(drawn.read_bytes())


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "figures"
    for name, chart, runs in PICTURES:
        draw(chart, runs, folder / f"claims-{name}.svg")
        print(folder / f"claims-{name}.svg")


if __name__ == "__main__":
    main()
