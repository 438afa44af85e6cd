"""Train ReLU and MaxK side by side: accuracy over several seeds, epoch time, pictures.

    python examples/maxk_sage.py --plot maxk.png
    python examples/maxk_sage.py --datasets Cora facebook-pages --root DIR --hidden 256 --k 8 32

MaxK keeps the k largest hidden features of every node, so that an aggregation reads k numbers of a
neighbour in place of all. Every network starts from the parameters of the ReLU network of its seed:
`pyg_accel.to_maxk(model, k)` is the whole change. Without files of real data sets it trains on a
graph of communities, whose features and labels are noisy. `benchmarks/maxk_training.py` is the
experiment at full size.
"""

import argparse
import os
import sys
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is never installed
from benchmarks import maxk_plot, maxk_training


def main() -> None:
    options = parse_options()
    console = Console()
    console.width = max(console.width, 100)  # of the table, also where it goes into a file
    if options.root:
        os.environ["PYG_ACCEL_DATA"] = options.root
    names = maxk_training.available(options.datasets, console.print)
    if not names:
        console.print("no data set is there: training on the community graph instead")
        names = ["community"]
    datasets = {name: maxk_training.load(name, nodes=options.nodes) for name in names}
    trainings, timings = maxk_training.experiment(
        datasets,
        options.models,
        options.k,
        hidden=options.hidden,
        seeds=options.seeds,
        epochs=options.epochs,
    )
    console.print(shown(maxk_training.table(trainings, timings)))
    if options.plot:
        maxk_plot.save(maxk_plot.draw_by_k(trainings, timings), options.plot)
        square = options.plot.with_stem(f"{options.plot.stem}_square")
        maxk_plot.save(maxk_plot.draw_square(maxk_plot.learn_square()), square)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = maxk_training.DATASETS
    parser.add_argument("--datasets", nargs="+", choices=known, default=["community"])
    parser.add_argument("--root", help="folder with the files of real data sets")
    parser.add_argument("--models", nargs="+", choices=maxk_training.CONVS, default=["SAGE"])
    parser.add_argument("--k", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=2_000, help="of the community graph")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="where to draw, e.g. maxk.png")
    return parser.parse_args()


def shown(frame: pd.DataFrame) -> Table:
    """The table, with what MaxK loses in red."""
    title = "accuracy of test nodes, mean ± standard deviation"
    limit = "limit: over patched if aggregation cost nothing"
    head = {"title": title, "caption": limit, "box": SIMPLE_HEAD}
    table = Table(*frame.columns, **head, collapse_padding=True)
    for column in table.columns:
        column.no_wrap = True
    for row in frame.itertuples(index=False):
        table.add_row(*map(str, row), style="red" if row.loses else None)
    return table


if __name__ == "__main__":
    main()
