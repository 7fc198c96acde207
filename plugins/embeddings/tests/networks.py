"""An encoder and a scorer of pairs whose answers can be computed by hand, and their archives."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.minilm.make import train_tokenizer
from modelyard.archiver import write_archive

WORDS = ("a good film", "the book was not as good as the film", "long and dull", "nobody liked it")
VOCABULARY, WIDTH, MOST_TOKENS, SEED = 400, 16, 24, 8


class Encoder(torch.nn.Module):
    """A vector per token, which its id alone decides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.table = torch.nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(N, L) and (N, L) to (N, L, WIDTH)."""
        found: torch.Tensor = self.table(input_ids) * attention_mask[..., None]
        return found


class Scorer(torch.nn.Module):
    """A score per pair: the mean vector of the second text along that of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.table = torch.nn.Embedding(VOCABULARY, WIDTH)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        """(N, L) three times to (N, 1)."""
        vectors = self.table(input_ids)
        second = (attention_mask * token_type_ids)[..., None].float()
        first = attention_mask[..., None] - second
        scores: torch.Tensor = (vectors * first).sum(1) * (vectors * second).sum(1)
        return scores.sum(1, keepdim=True) / 16


def build(folder: Path, store: Path) -> None:
    """Write the archives `encoder` and `scorer` to a store."""
    tokenizer = train_tokenizer(WORDS)
    tokenizer.save(str(folder / "tokenizer.json"))
    dims = {0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("length", max=MOST_TOKENS)}
    for name, network, handler, section in (
        (
            "encoder",
            Encoder,
            "text_encoder",
            f"{{dimensions: [4], max_batch_tokens: {MOST_TOKENS}}}",
        ),
        ("scorer", Scorer, "text", "{}"),
    ):
        model = network().eval()
        count = 2 if network is Encoder else 3
        example = tuple(torch.ones(2, 3, dtype=torch.int64) for _ in range(count))
        program = torch.export.export(model, example, dynamic_shapes=(dims,) * count)
        torch.export.save(program, folder / f"{name}.pt2")
        (folder / "model-config.yaml").write_text(
            f"handler: {{text: {section}}}\nbatchSize: 8\njobQueueSize: 1000\n"
        )
        write_archive(
            name, version="1.0", artifact=folder / f"{name}.pt2", handler=handler,
            extra_files=[folder / "tokenizer.json"], config_file=folder / "model-config.yaml",
            output_dir=store,
        )  # fmt: skip
