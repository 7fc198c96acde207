"""Recall of an index of the served artifact beside its checkpoint's, and what the certificate says.

    python -m benchmarks.recall CHECKPOINT [--texts 1000] [--k 10] [--quantize int8-dynamic]

CHECKPOINT is a folder of Hugging Face's, as of all-MiniLM-L6-v2. It is exported to ONNX (with
--quantize to 8 bits, too), archived and served; the vectors come from `/v1/embeddings`, those of
the checkpoint from transformers, with its own tokenizer. The texts are sentences of the docstrings
of Python's library and of the descriptions of scikit-learn's data sets. Each is a query.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import torch
import typer

from benchmarks.archives import CommandFailed, Subject, modelyard
from benchmarks.server import Server
from modelyard.plugins.embeddings.recall import Recall, bounds, compare

MODULES = """
    argparse asyncio collections concurrent.futures csv ctypes dataclasses datetime decimal
    difflib email enum fractions functools heapq http.client imaplib inspect io itertools json
    logging mailbox multiprocessing os pathlib pickle random re shutil smtplib socket sqlite3
    ssl statistics string struct subprocess tarfile tempfile textwrap threading tkinter tokenize
    traceback types typing unittest urllib.request uuid wave weakref xml.dom zipfile zoneinfo
"""
MOST_TOKENS, BATCH, LEAST_WORDS, AT_ONCE = 256, 32, 5, 100
COLUMNS = ("texts", "k", "recall", "promised", "bound", "error", "beyond", "holds")


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the model.")],
    texts: Annotated[int, typer.Option(min=20)] = 1000,
    k: Annotated[int, typer.Option(min=1)] = 10,
    quantize: Annotated[list[str], typer.Option(help="Repeatable.")] = [],  # noqa: B006
    artifact: Annotated[Path | None, typer.Option(help="ONNX in float32, exported before.")] = None,
) -> None:
    """State recall@k of what is served.

    Example: python -m benchmarks.recall build/minilm --texts 500
    """
    found = corpus(texts)
    tokens = encode(checkpoint, found)
    typer.echo(f"{len(found)} sentences, {sum(map(len, tokens))} tokens")
    typer.echo("  ".join([f"{'artifact':14}", *(f"{each:>9}" for each in COLUMNS)]))
    with tempfile.TemporaryDirectory(prefix="modelyard-recall-") as name:
        for kind in ("", *quantize):
            try:
                folder, done = Path(name) / (kind or "float32"), None if kind else artifact
                result = measure(folder, checkpoint, kind, found, tokens, k, done)
            except CommandFailed as error:
                typer.echo(f"{kind or 'float32':14}  not exported: {error}")
                continue
            cells = (getattr(result, each) for each in COLUMNS)
            shown = (
                f"{each:9.4g}" if isinstance(each, float) else f"{each!s:>9}" for each in cells
            )
            typer.echo("  ".join([f"{kind or 'float32':14}", *shown]))


def measure(
    folder: Path, checkpoint: Path, quantize: str, texts: Sequence[str],
    tokens: Sequence[np.ndarray], k: int, artifact: Path | None = None,
) -> Recall:  # fmt: skip
    """Export, archive and serve, and compare the vectors with the checkpoint's."""
    (folder / "store").mkdir(parents=True)
    artifact = artifact or _export(folder, checkpoint, quantize, texts)
    (config := folder / "model-config.yaml").write_text("batchSize: 16\njobQueueSize: 4096\n")
    modelyard("archive", "encoder", "--artifact", artifact, "--handler", "text_encoder",
              "--version", "1.0", "--extra-files", checkpoint / "tokenizer.json",
              "--config-file", config, "-o", folder / "store")  # fmt: skip
    report = json.loads(artifact.with_name(f"{artifact.name}.report.json").read_text())
    stated = next(iter(report["parity"]["outputs"].values()))
    subject = Subject("encoder", folder / "store" / "encoder.mar", "application/json", ())
    with Server(subject, 1, folder / "state") as server:
        url = server.url.partition("/predictions")[0] + "/v1/embeddings"
        served = ask(url, texts)
    return compare(unit(tokens), served, bounds(tokens, stated), k)


def _export(folder: Path, checkpoint: Path, quantize: str, texts: Sequence[str]) -> Path:
    size = f"int64[batch=1..{BATCH},length=1..{MOST_TOKENS}]"
    more = []
    if quantize:
        (sample := folder / "sample.txt").write_text("\n".join(texts[:200]))
        more = [f"--quantize={quantize}", f"--sample={sample}"]
    modelyard("export", checkpoint, f"--input=input_ids:{size}", f"--input=attention_mask:{size}",
              "--format=onnx", *more, "-o", folder)  # fmt: skip
    return next(folder.glob("*.onnx"))


def ask(url: str, texts: Sequence[str]) -> np.ndarray:
    """Return the vectors that a server gives."""
    found = []
    for at in range(0, len(texts), AT_ONCE):
        body = {"model": "encoder", "input": list(texts[at : at + AT_ONCE])}
        answer = httpx.post(url, json=body, timeout=600).raise_for_status()
        found += [each["embedding"] for each in answer.json()["data"]]
    return np.array(found, np.float32)


def unit(tokens: Sequence[np.ndarray]) -> np.ndarray:
    """Return the unit vector of each text, (N, E)."""
    means = np.array([each.mean(0) for each in tokens])
    found: np.ndarray = means / np.linalg.norm(means, axis=1, keepdims=True)
    return found


def encode(checkpoint: Path, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the checkpoint's vectors of each text's tokens, (L, E): transformers', one by one."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    model = AutoModel.from_pretrained(checkpoint, local_files_only=True, use_safetensors=True)
    model.eval()
    torch.set_num_threads(1)
    found = []
    with torch.inference_mode():
        for text in texts:
            inputs = tokenizer(text, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
            found.append(model(**inputs).last_hidden_state[0].double().numpy())
    return found


def corpus(count: int) -> list[str]:
    """Return so many sentences of the texts that this machine has, each once, in one order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that are asked for what is deprecated
        pages = list(_pages())
    texts = {each for part in pages for each in re.split(r"(?<=[.!?])\s+(?=[A-Z])", part)}
    found = sorted(" ".join(each.split()) for each in texts if "\n\n" not in each)
    found = [each for each in dict.fromkeys(found) if LEAST_WORDS <= len(each.split()) <= 60]
    random.Random(0).shuffle(found)
    return found[:count]


def _pages() -> Iterator[str]:
    import sklearn.datasets.descr

    for name in MODULES.split():
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        members = [value for _, value in inspect.getmembers(module)]
        for value in (module, *members, *(each for m in members if inspect.isclass(m)
                                          for each in vars(m).values())):  # fmt: skip
            if isinstance(text := getattr(value, "__doc__", None), str):
                yield from text.split("\n\n")
    folder = Path(next(iter(sklearn.datasets.descr.__path__)))
    for file in sorted(folder.glob("*.rst")):
        yield from file.read_text(encoding="utf-8").split("\n\n")


if __name__ == "__main__":
    typer.run(main)
