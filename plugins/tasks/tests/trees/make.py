"""Write tree ensembles as ONNX files, and what shap's TreeExplainer says of them.

    python -m venv env
    env/bin/pip install scikit-learn skl2onnx onnxmltools xgboost lightgbm shap
    env/bin/python plugins/tasks/tests/trees/make.py plugins/tasks/tests/trees

These are no dependency of the tests, which read what was written: `NAME.onnx`, and in `cases.json`
rows, a background of 20 rows and the Shapley values of the margin (`feature_perturbation`
interventional), per row and output, [] of one alone. Rows are rounded to float32 first, as the
model is asked with, and moved a little, off the thresholds that a file has in float32 too.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import onnx.helper
import onnxmltools
import shap
import skl2onnx
import sklearn.datasets as data
import xgboost
from onnxmltools.convert.common.data_types import FloatTensorType
from sklearn import ensemble, tree
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

BACKGROUND, ROWS = 20, 6


def models() -> Iterator[tuple[str, str, Any]]:
    """Yield name, data set and an untrained model."""
    few = {"n_estimators": 12, "random_state": 0}
    yield "decision_tree", "iris", tree.DecisionTreeClassifier(max_depth=4, random_state=0)
    yield "random_forest", "wine", ensemble.RandomForestClassifier(max_depth=4, **few)
    yield "extra_trees", "diabetes", ensemble.ExtraTreesRegressor(max_depth=5, **few)
    yield "boosting_regressor", "diabetes", ensemble.GradientBoostingRegressor(**few)
    yield "boosting_classifier", "cancer", ensemble.GradientBoostingClassifier(**few)
    # shap reads no other losses of it; missing values go the way that training found.
    yield "histogram", "holes", ensemble.HistGradientBoostingRegressor(max_iter=12, max_depth=4)
    yield "xgboost_classifier", "cancer", xgboost.XGBClassifier(max_depth=4, **few)
    yield "xgboost_classes", "wine", xgboost.XGBClassifier(max_depth=3, **few)
    yield "xgboost_regressor", "diabetes", xgboost.XGBRegressor(max_depth=4, **few)
    yield "lightgbm_classes", "wine", lightgbm.LGBMClassifier(num_leaves=8, verbose=-1, **few)
    scaled = ensemble.GradientBoostingClassifier(**few)
    yield "scaled", "cancer", make_pipeline(StandardScaler(), scaled)


def read(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows, rounded to float32, and labels."""
    loaders = {"iris": data.load_iris, "wine": data.load_wine, "cancer": data.load_breast_cancer}
    rows, labels = loaders.get(name, data.load_diabetes)(return_X_y=True)
    # So that no row lies on a threshold, where float32 and float64 part.
    random = np.random.default_rng(0)
    rows = (rows + 0.01 * rows.std(0) * random.standard_normal(rows.shape)).astype(np.float32)
    if name == "holes":
        rows[random.random(rows.shape) < 0.2] = np.nan
    return rows, labels


def convert(model: Any, width: int) -> Any:
    """Return the ONNX file of a model."""
    inputs = [("row", FloatTensorType([None, width]))]
    kind = type(model).__module__
    if kind.startswith("xgboost"):
        return onnxmltools.convert_xgboost(model, initial_types=inputs)
    if kind.startswith("lightgbm"):
        return onnxmltools.convert_lightgbm(model, initial_types=inputs, zipmap=False)
    inputs = [("row", skl2onnx.common.data_types.FloatTensorType([None, width]))]
    is_classifier = hasattr(model, "predict_proba")
    options = {id(model): {"zipmap": False}} if is_classifier else None
    return skl2onnx.convert_sklearn(model, initial_types=inputs, options=options)


_make_attribute = onnx.helper.make_attribute


def _of_numbers(key: str, value: Any, *args: Any, **others: Any) -> Any:
    """Make an attribute also of the truth values that skl2onnx 1.20 leaves in histograms' nodes."""
    if isinstance(value, list) and any(isinstance(each, bool | np.bool_) for each in value):
        value = list(map(int, value))
    return _make_attribute(key, value, *args, **others)


def main(folder: Path) -> None:
    """Write all of them."""
    onnx.helper.make_attribute = _of_numbers
    cases: dict[str, Any] = {}
    for name, dataset, model in models():
        rows, labels = read(dataset)
        order = np.random.default_rng(1).permutation(len(rows))
        rows, labels = rows[order], labels[order]
        model.fit(rows.astype(np.float64) if name == "scaled" else rows, labels)
        background, asked = rows[:BACKGROUND], rows[-ROWS:]
        explained, scale = model, lambda each: each
        if name == "scaled":
            scale, explained = model[0].transform, model[1]
        explainer = shap.TreeExplainer(
            explained, scale(background), feature_perturbation="interventional"
        )
        values = explainer.shap_values(scale(asked), check_additivity=False)
        expected = explainer.expected_value
        if name.startswith("xgboost"):
            # shap 0.51 has one base score for all classes, and XGBoost 3 one for each.
            expected = model.predict(background, output_margin=name != "xgboost_regressor").mean(0)
        (folder / f"{name}.onnx").write_bytes(convert(model, rows.shape[1]).SerializeToString())
        cases[name] = {
            "background": background.tolist(),
            "rows": asked.tolist(),
            "values": np.asarray(values).tolist(),
            "expected": np.asarray(expected).tolist(),
        }
    text = json.dumps(cases).replace("NaN", "null")
    (folder / "cases.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
