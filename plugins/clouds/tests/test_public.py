"""Public `inference.py` files, unchanged: read from checkouts of AWS's repositories.

`scripts/sagemaker-suite FOLDER` runs this; FOLDER holds the checkouts by their names. Weights are
made by each file's own class where its repository has none.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from plugins.clouds.tests.containers import Container, container, has_peers

CHECKOUTS = os.environ.get("SAGEMAKER_CHECKOUTS")
PYTHON = has_peers("sagemaker")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHECKOUTS is None or PYTHON is None,
        reason="needs `scripts/peers sagemaker` and SAGEMAKER_CHECKOUTS",
    ),
]
COMMITS = {
    "sagemaker-pytorch-inference-toolkit": "cc8bf99ce501f5d4cc67420692b38af5143b1597",
    "amazon-sagemaker-examples": "2d519b52c3a2c2361f2b87f0d3de46fd6c0232a5",
    "sagemaker-python-sdk": "a24812666d258d9d19c9a82d0c9385ca0bd3ba01",
}
"""Checkout → commit that is read."""
TOOLKIT, EXAMPLES, SDK = COMMITS
JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
IMAGE, BYTES = "application/x-image", "application/octet-stream"


def npy(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def picture(mode: str, width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


ONES = np.ones((2, 1, 28, 28), np.float32)
ROWS = b"1," * 783 + b"1\n" + b"2," * 783 + b"2"
MNIST = (NPY, npy(ONES), (2, 10))
INPUTS = (JSON, json.dumps({"inputs": ONES.tolist()}).encode(), (2, 10))
NET = "from inference import Net; torch.save(Net().state_dict(), 'model.pth')"
PARALLEL = (
    "from inference import Net; torch.save(torch.nn.DataParallel(Net()).state_dict(), 'model.pth')"
)
TABLE = "from pytorch_model_def import get_model; torch.save(get_model().state_dict(), 'model.pth')"
HOUSE = (JSON, b"[[1, 2, 3, 4, 5, 6, 7, 8]]", None)
PIXELS = (
    "n = torch.nn; m = n.Sequential(n.AdaptiveAvgPool2d(2), n.Flatten(), n.Linear(12, 10))\n"
    "torch.jit.script(m).save('model.pt')"
)
DETECTOR = """
from typing import List
class Detector(torch.nn.Module):
    def forward(self, images: List[torch.Tensor]) -> torch.Tensor:
        return torch.stack([image.mean((1, 2)) for image in images])
torch.jit.script(Detector()).save('model.pt')
"""
WORDS = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = ['[PAD]', '[UNK]', 'good', 'bad', 'film', 'a', '</s>']
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='[UNK]'))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token='[PAD]', unk_token='[UNK]', eos_token='</s>',
    model_input_names=['input_ids', 'attention_mask'], model_max_length=512)
small = dict(vocab_size=8, dim=8, n_heads=2, n_layers=1, hidden_dim=8, num_labels=2)
"""
BERT = "distilbert-base-uncased"
"""A name on the hub; a folder of this name beside the model stands for it here."""
PAIR = WORDS + (
    "from transformers import DistilBertConfig, DistilBertForSequenceClassification as Model\n"
    "model = Model(DistilBertConfig(**small))\n"
    f"model.save_pretrained('{BERT}'); tokenizer.save_pretrained('{BERT}')\n"
    "model.save_pretrained('model')"
)
TAGS = WORDS + (
    "import json, pathlib\n"
    "from transformers import DistilBertConfig, DistilBertForTokenClassification as Model\n"
    "Model(DistilBertConfig(**small)).save_pretrained('.'); tokenizer.save_pretrained('.')\n"
    "pathlib.Path('integer_to_label.json').write_text(json.dumps({0: 'O', 1: 'B'}))"
)
SEQUENCES = WORDS + (
    "from transformers import T5Config, T5ForConditionalGeneration as Model\n"
    "config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,\n"
    "                  decoder_start_token_id=0)\n"
    "Model(config).save_pretrained('.'); tokenizer.save_pretrained('.')"
)


@dataclass(frozen=True)
class Public:
    """One public file."""

    checkout: str
    path: str
    """Ends with its path; folders of the examples begin with blanks."""
    request: tuple[str, bytes, tuple[int, ...] | None]
    """Media type, body, and shape of the answer, where it has one."""
    weights: str = ""
    """Code that makes them, in the model folder."""
    beside: tuple[str, ...] = ()
    """Files of its folder that it imports."""
    shipped: str = ""
    """Weights of its repository, relative to its folder."""


PUBLIC = {
    "mnist": Public(TOOLKIT, "mnist/model_cpu/code/mnist.py", MNIST, shipped="../torch_model.pth"),
    "mnist_1d": Public(
        TOOLKIT, "model_cpu/1d/code/mnist_1d.py", (CSV, ROWS, (2, 10)),
        shipped="../torch_model.pth",
    ),
    "call_model_fn_once": Public(TOOLKIT, "code/call_model_fn_once.py", (BYTES, b"input", None)),
    "mme_resnet18": Public(
        TOOLKIT, "mme/resnet18/code/inference.py", (BYTES, picture("RGB", 300, 260), (10,)), PIXELS
    ),
    "tuning": Public(EXAMPLES, "sm-hyperparameter_tuning_pytorch/mnist.py", MNIST, PARALLEL),
    "script_mode": Public(
        EXAMPLES, "basic-script-mode/custom_script.py", HOUSE, TABLE, ("pytorch_model_def.py",)
    ),
    "local_training": Public(
        EXAMPLES, "basic-script-mode/local_training_script.py", HOUSE, TABLE,
        ("pytorch_model_def.py",),
    ),
    "without_dependencies": Public(
        EXAMPLES, "train_deploy_pytorch_without_dependencies.py", HOUSE, TABLE,
        ("pytorch_model_def.py",),
    ),
    "batch_transform": Public(
        EXAMPLES, "sm-batch_transform_pytorch/model-script/mnist.py",
        (IMAGE, picture("L", 28, 28), None), PARALLEL,
    ),
    "multi_container": Public(
        EXAMPLES, "sm-multi_container_endpoint_direct_invocation/pytorch/code/inference.py", INPUTS
    ),
    "multi_model": Public(
        EXAMPLES, "archived/multi_model_pytorch/code/inference.py", INPUTS,
        "from model import MNISTNet; torch.save(MNISTNet().state_dict(), 'model.pth')",
        ("model.py",),
    ),
    "pytorch": Public(EXAMPLES, "archived/pytorch/code/inference.py", INPUTS, NET),
    "cifar10": Public(
        EXAMPLES, "pytorch_cnn_cifar10/source/cifar10.py",
        (JSON, json.dumps(np.ones((2, 3, 32, 32)).tolist()).encode(), (2, 10)), NET,
    ),
    "horovod": Public(
        EXAMPLES, "pytorch_horovod_mnist/code/inference.py", MNIST,
        NET.replace("inference", "model_def"), ("model_def.py",),
    ),
    "smdataparallel": Public(
        EXAMPLES, "pytorch_smdataparallel_mnist_demo/code/inference.py", MNIST,
        NET.replace("inference", "model_def"), ("model_def.py",),
    ),
    "model_zoo": Public(
        EXAMPLES, "sagemaker_pytorch_model_zoo/inference.py", (IMAGE, picture("RGB", 8, 8), (1, 3)),
        DETECTOR,
    ),
    "inf1_resnet18": Public(
        EXAMPLES, "deploy_pytorch_model_on_Inf1_instance/resnet18.py",
        (IMAGE, picture("RGBA", 300, 260), (1, 10)), PIXELS,
    ),
    "train": Public(EXAMPLES, "sm-train_a_pytorch_model/mnist.py", MNIST, PARALLEL),
    "summaries": Public(
        EXAMPLES, "sm-finetuning_huggingface_with_your_own_scripts_and_data/source/inference.py",
        (JSON, b'{"inputs": ["a good film"]}', (1,)), SEQUENCES,
    ),
    "sentiment": Public(
        EXAMPLES, "sm-clarify_natural_language_processing_online_explainability/code/inference.py",
        (CSV, b"a good film\na bad film\n", (2,)), PAIR,
    ),
    "paraphrase": Public(
        EXAMPLES, "deploy_huggingface_model_on_Inf1_instance/code/inference_normal.py",
        (JSON, b'["a good film", "a bad film"]', None), PAIR,
    ),
    "entities": Public(
        EXAMPLES, "containers/entity_recognition/finetuning/inference.py",
        ("application/list-text", b'[["a", "good", "film"], ["bad", "film", "film"]]', None), TAGS,
    ),
    "sdk_mnist": Public(SDK, "sagemaker-mlops/tests/integ/code/mnist.py", MNIST, PARALLEL),
}  # fmt: skip
"""Name → a public file."""


def git(checkout: str, *arguments: str) -> bytes:
    assert CHECKOUTS is not None
    return subprocess.run(
        ["git", "-C", Path(CHECKOUTS, checkout), *arguments], capture_output=True, check=True
    ).stdout


def find(checkout: str, path: str) -> str:
    listed = git(checkout, "ls-tree", "-rz", "--name-only", COMMITS[checkout]).decode().split("\0")
    (found,) = [name for name in listed if f"/{name.strip()}".endswith(f"/{path}")]
    return found


def write_model(folder: Path, public: Public) -> None:
    """Write a model folder of a public file, byte for byte, and weights for it."""
    (folder / "code").mkdir(parents=True)
    place = find(public.checkout, public.path)
    commit, parent = COMMITS[public.checkout], place.rpartition("/")[0]
    for name, source in {
        "inference.py": place, **{each: f"{parent}/{each}" for each in public.beside}
    }.items():  # fmt: skip
        content = git(public.checkout, "cat-file", "blob", f"{commit}:{source}")
        (folder / "code" / name).write_bytes(content)
    if public.shipped:
        source = os.path.normpath(f"{parent}/{public.shipped}")
        content = git(public.checkout, "cat-file", "blob", f"{commit}:{source}")
        (folder / Path(source).name).write_bytes(content)
    if public.weights:
        shim = Path(__file__).parents[1] / "shim"
        code = f"import sys, torch\nsys.path[:0] = ['code', {str(shim)!r}]\n{public.weights}"
        assert PYTHON is not None
        file = folder.with_suffix(".py")  # TorchScript reads a class's source
        file.write_text(code)
        subprocess.run([PYTHON, file], cwd=folder, check=True, timeout=300)


@pytest.fixture(scope="module")
def amazon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Container, Path]]:
    """Start one container of several models, whose folders they may write as on SageMaker."""
    folder = tmp_path_factory.mktemp("public")
    models = folder / "models"
    models.mkdir()
    told = {"SAGEMAKER_MULTI_MODEL": "true", "MODELYARD_WRITE_PATHS": str(models)}
    told |= {"MODELYARD_WORKER_UIDS": "", "HF_HUB_OFFLINE": "1"}
    assert PYTHON is not None
    with container("sagemaker", models, folder / "state", told, python=PYTHON) as started:
        yield started, models


MISSES = {"paraphrase": "transformers 5 has no encode_plus"}
"""Name → why a file is not served."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.xfail(reason=MISSES[name], strict=True)] if name in MISSES else [],
        )
        for name in PUBLIC
    ],
)
def test_a_public_file_unchanged(amazon: tuple[Container, Path], name: str) -> None:
    started, models = amazon
    public = PUBLIC[name]
    write_model(models / name, public)
    told = {"model_name": name, "url": str(models / name)}
    loaded = started.client.post("/models", json=told, timeout=300)
    assert loaded.status_code == 200, loaded.text
    kind, body, shape = public.request
    for _ in range(2):
        answer = started.client.post(
            f"/models/{name}/invoke", content=body, headers={"content-type": kind}, timeout=300
        )
        assert answer.status_code == 200, answer.text
        if name == "call_model_fn_once":
            assert answer.content == b"output"
        elif shape is None:
            assert answer.json()
        else:
            assert np.array(answer.json()).shape == shape
    assert started.client.delete(f"/models/{name}").status_code == 200
