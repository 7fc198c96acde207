"""Draw one scan as each attribution method explains it: the pictures of docs/explain.md.

python examples/digits/gallery.py docs/images/gallery
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import yaml

from modelyard.exporter import export
from modelyard.handlers import Context, ImageClassifier

HERE = Path(__file__).parent
SCAN, TARGET = 4, "9"

QUERIES = {
    "integrated_gradients": {},
    "layer_integrated_gradients": {"layer": "features.2"},
    "layer_grad_cam": {"layer": "features.2"},
    "guided_grad_cam": {"layer": "features.2"},
    "deep_lift": {},
    "saliency": {},
    "input_x_gradient": {},
    "smoothgrad": {"noise": "0.15"},
    "gradient_shap": {"baseline": "file:set", "n_samples": "2000"},
    "occlusion": {"window": "2", "stride": "1"},
    "feature_ablation": {},
    "kernel_shap": {"n_samples": "2000"},
}
"""Method → its further options: why is the scan of a 4 no 9?"""


def main() -> None:
    """Write a picture for each method into the folder that is named."""
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        handler, context = load(Path(name))
        for method, query in QUERIES.items():
            context.reset(
                ["gallery"],
                queries=[{"method": method, "target": TARGET, "format": "png", **query}],
            )
            body = (HERE / "scans" / f"{SCAN}.png").read_bytes()
            (picture,) = handler.explain([{"body": body}], context)
            (target / f"{method}.png").write_bytes(picture)
            print(target / f"{method}.png")


def load(folder: Path) -> tuple[ImageClassifier, Context]:
    """Lay the digits model out in a folder as an unpacked archive, and load it as a worker does."""
    (report,) = export(
        HERE / "digits.pt",
        f"{HERE / 'net.py'}:DigitsNet",
        ["image:float32[batch,1,8,8]"],
        output_names=["logits"],
        formats=["pt2"],
        output_dir=folder,
    )
    shutil.copytree(HERE / "scans", folder / "set", ignore=shutil.ignore_patterns("*.json"))
    shutil.copy(HERE / "index_to_name.json", folder)
    signature = json.loads(report.artifact.with_name("digits.pt2.report.json").read_text())
    manifest = {
        "model": {"serializedFile": report.artifact.name},
        "modelyard": {"signature": signature["signature"]},
    }
    settings = yaml.safe_load((HERE / "model-config.yaml").read_text())
    context = Context("digits", str(folder), manifest, model_yaml_config=settings)
    context.reset(["gallery"])
    handler = ImageClassifier()
    handler.initialize(context)
    return handler, context


if __name__ == "__main__":
    main()
