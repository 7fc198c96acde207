"""Two small networks for tones: one names a tone, one spells what a tune says.

Run from the repository's folder: `python -m examples.tasks.sounds FOLDER`. Every letter is a tone
of a pitch of its own. It trains both networks in seconds and writes FOLDER/tone.pt and
FOLDER/speller.pt, a folder with the files of each, and two sounds: FOLDER/tone.wav and
FOLDER/tune.wav, which spells "cab".
"""

import argparse
import json
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

RATE, FRAME = 4000, 80
PITCHES = {"a": 300, "b": 500, "c": 800, "d": 1200}
VOCABULARY = {"<pad>": 0, "|": 1, **{letter: at for at, letter in enumerate(PITCHES, 2)}}
TUNE = "cab"
SEED = 0


class Tones(nn.Module):
    """What sounds in every frame of 80 samples, or in the whole of it."""

    def __init__(self, classes: int, is_whole: bool = True) -> None:
        super().__init__()
        self.is_whole = is_whole
        self.filters = nn.Conv1d(1, 32, FRAME, stride=FRAME)
        self.head = nn.Linear(32, classes)

    def forward(self, wave: Tensor) -> Tensor:
        """(N, samples) to (N, classes), or (N, frames, classes)."""
        energy = self.filters(wave.unsqueeze(1)).square().add(1e-3).log().transpose(1, 2)
        return self.head(energy.mean(1) if self.is_whole else energy)  # type: ignore[no-any-return]


class Speller(Tones):
    """A letter, a space or nothing for every frame."""

    def __init__(self) -> None:
        super().__init__(len(VOCABULARY), is_whole=False)


class Namer(Tones):
    """The letter of a sound."""

    def __init__(self) -> None:
        super().__init__(len(PITCHES))


def tone(letter: str, frames: int, random: np.random.Generator, rate: int = RATE) -> np.ndarray:
    """Return a letter's tone with some noise; anything else is noise alone."""
    time = np.arange(int(frames * FRAME * rate / RATE)) / rate
    noise = random.normal(0, 0.02, len(time))
    if letter not in PITCHES:
        return noise.astype(np.float32)
    phase = random.uniform(0, 2 * np.pi)
    wave = random.uniform(0.3, 0.8) * np.sin(2 * np.pi * PITCHES[letter] * time + phase)
    return (wave + noise).astype(np.float32)


def tune(text: str, random: np.random.Generator, rate: int = RATE) -> np.ndarray:
    """Return a text as tones with silence between them."""
    parts = [tone("", 2, random, rate)]
    for letter in text:
        parts += [tone(letter, 4, random, rate), tone("", 2, random, rate)]
    return np.concatenate(parts)


def make(folder: Path, steps: int = 200) -> Path:
    """Train both networks and write them with their files; return the folder."""
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    letters = ["", *PITCHES]
    wanted = torch.tensor([at % len(letters) for at in range(400)])
    waves = torch.from_numpy(np.stack([tone(letters[at], 4, random) for at in wanted]))
    namer, speller = Namer(), Speller()
    optimizer = torch.optim.Adam([*namer.parameters(), *speller.parameters()], lr=1e-2)
    outputs = torch.tensor([0, *range(2, len(VOCABULARY))])[wanted]
    for _ in range(steps):
        rows = torch.from_numpy(random.choice(len(waves), 64, replace=False))
        spoken = rows[wanted[rows] > 0]
        loss = cross_entropy(speller(waves[rows]).flatten(0, 1), outputs[rows].repeat_interleave(4))
        loss = loss + cross_entropy(namer(waves[spoken]), wanted[spoken] - 1)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    settings = f"handler: {{audio: {{rate: {RATE}, seconds: 10}}}}\n"
    labels = json.dumps({str(at): letter for at, letter in enumerate(PITCHES)})
    for name, net, file, content in (
        ("tone", namer, "index_to_name.json", labels),
        ("speller", speller, "vocab.json", json.dumps(VOCABULARY)),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), folder / f"{name}.pt")
        (folder / name / file).write_text(content)
        (folder / name / "model-config.yaml").write_text(settings)
    soundfile.write(folder / "tone.wav", tone("b", 20, random), RATE)
    soundfile.write(folder / "tune.wav", tune(TUNE, random, 8000), 8000)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
