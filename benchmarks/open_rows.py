"""How long large data takes to open with `data.streaming`, and what memory and disk it takes.

Writes rows as JSON Lines and as Parquet, and opens them from the disk and from a web server on this
machine (of `tests/standins`), each in a process of its own:

    python -m benchmarks.open_rows --rows 100000000 --folder /tmp/rows

100 million rows take about 11 GB there, Arrow file and index included. With several numbers of
rows, a table shows how each figure grows:

    python -m benchmarks.open_rows --rows 1000000,10000000,100000000 --cases jsonl,parquet \
        --folder /tmp/rows
"""

from __future__ import annotations

import argparse
import json
import mmap
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.growth import growth_table

BLOCK = 1_000_000
CASES = ("jsonl", "parquet", "remote jsonl", "remote parquet")


def write(folder: Path, rows: int) -> None:
    """Both files, a block of rows again and again."""
    import pyarrow as pa
    from pyarrow import parquet

    prompts = [f"Count to {number}:" for number in range(BLOCK)]
    answers = [f"{number % 97} " * (number % 9 + 1) for number in range(BLOCK)]
    lines = "".join(
        f'{{"prompt": "{prompt}", "completion": "{answer}"}}\n'
        for prompt, answer in zip(prompts, answers, strict=True)
    ).encode()
    table = pa.table({"prompt": prompts, "completion": answers})
    with (
        (folder / "rows.jsonl").open("wb") as text,
        parquet.ParquetWriter(folder / "rows.parquet", table.schema) as columns,
    ):
        for start in range(0, rows, BLOCK):
            last = min(BLOCK, rows - start)
            whole = last == BLOCK
            text.write(lines if whole else b"".join(lines.splitlines(keepends=True)[:last]))
            columns.write_table(table if whole else table.slice(0, last), row_group_size=100_000)


def measure(folder: Path, case: str, steps: int) -> dict[str, Any]:
    """Open, read some steps, and some from the middle; in this process."""
    import datasets  # noqa: F401 - imports are no part of what is measured
    import torch  # noqa: F401

    from anygauge.config.schema import DataSection, TrainSection
    from anygauge.data import Layout, prepare, training_batches
    from tests.helpers.tokenizer import make_tokenizer
    from tests.standins.files import File, FileServer

    name = f"rows.{case.split()[-1]}"
    cache = folder / f"cache-{case.replace(' ', '-')}"
    shutil.rmtree(cache, ignore_errors=True)
    tokenizer = make_tokenizer(folder / "tokenizer")
    layout = Layout(micro_batch=8, max_length=64, pad_id=2)

    def opened(path: str, index: int) -> tuple[float, float, Any]:
        began = time.perf_counter()
        section = DataSection(train={"path": path}, streaming=True, cache=str(cache), max_length=64)
        train = TrainSection(global_batch_size=32, steps=10_000_000)
        rows = prepare(section, tokenizer, seed=0).train
        batches = training_batches(rows, section, train, layout, lambda values: values)
        ready = time.perf_counter() - began
        batches.step(index)
        first = time.perf_counter() - began
        for number in range(index + 1, index + steps):
            batches.step(number)
        return ready, first, rows

    def result(path: str) -> dict[str, Any]:
        before = time.process_time()
        ready, first, rows = opened(path, 0)
        cpu = time.process_time() - before
        count = rows.blocks.length if rows.blocks else len(rows)
        found = {"rows": count, "open_s": ready, "first_batch_s": first, "cpu_s": cpu}
        found["again_s"] = opened(path, 0)[1]
        middle = (count or ROWS) // 64
        found["middle_s"] = opened(path, middle)[1]
        return found

    if not case.startswith("remote"):
        found = result(str(folder / name))
    else:
        with (folder / name).open("rb") as file:
            body: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with FileServer({name: File(body=body)}) as server:
                opened(server.address(name), 0)
                found = {"sent_mb": server.sent / 1e6, **result(server.address(name))}
    kept = sum(p.stat().st_size for p in cache.rglob("*") if p.is_file())
    status = Path("/proc/self/status").read_text()
    # Without pages of mapped files, which the kernel takes back as it likes.
    memory = next(int(line.split()[1]) for line in status.splitlines() if "RssAnon" in line)
    return {**found, "cache_mb": kept / 1e6, "memory_mb": memory / 1024}


ROWS = 100_000_000

COLUMNS: Mapping[str, tuple[str, float, str]] = {
    "case": ("source", 1, ""),
    "rows": ("rows", 1, ",.0f"),
    "file_mb": ("file, MB", 1, ",.0f"),
    "cache_mb": ("in the cache, MB", 1, ",.1f"),
    "open_s": ("opened after, s", 1, ".2f"),
    "first_batch_s": ("first batch after, s", 1, ".2f"),
    "cpu_s": ("CPU s of these and 50 steps", 1, ".2f"),
    "again_s": ("opened again, s", 1, ".2f"),
    "middle_s": ("from the middle, s", 1, ".2f"),
    "memory_mb": ("memory, MiB", 1, ".0f"),
}


def main() -> None:
    """Write, measure each case, print what it found and a table, and remove what was written."""
    global ROWS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=str(ROWS), help="one or several, with commas between")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cases", default=",".join(CASES), help="those of a table")
    parser.add_argument("--case", choices=CASES, help="this one alone, on files that are there")
    options = parser.parse_args()
    if options.case:
        ROWS = int(options.rows)
        print(json.dumps(measure(options.folder, options.case, options.steps)))
        return
    cases = options.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"--cases: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    table = []
    for rows in map(int, options.rows.split(",")):
        for found in growth(options.folder, rows, cases, options.steps):
            table.append(found)
            shown = (
                f"{k} {v:,.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()
            )
            print(", ".join(shown), flush=True)
    print(growth_table(COLUMNS, table))


def growth(
    folder: Path, rows: int, cases: Sequence[str], steps: int
) -> Iterator[Mapping[str, Any]]:
    """What each case measured of so many rows."""
    folder.mkdir(parents=True)
    try:
        write(folder, rows)
        for case in cases:
            command = [sys.executable, "-m", "benchmarks.open_rows", "--case", case]
            command += ["--rows", str(rows), "--folder", str(folder), "--steps", str(steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            size = (folder / f"rows.{case.split()[-1]}").stat().st_size / 1e6
            yield {"case": case, "file_mb": size, **json.loads(done.stdout.splitlines()[-1])}
            shutil.rmtree(folder / f"cache-{case.replace(' ', '-')}", ignore_errors=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
