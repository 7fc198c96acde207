"""Write the files of this folder: default exports of scikit-learn, XGBoost and LightGBM.

Beside each lies what the tool itself predicts. In an environment of its own:

    pip install scikit-learn skl2onnx onnxmltools xgboost lightgbm pandas onnxruntime
    python tests/exporter/onnx_files/make.py

Made with scikit-learn 1.9.1, skl2onnx 1.20.0, onnxmltools 1.16.0, xgboost 3.2.0, lightgbm 4.7.0.
"""

import json
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import onnxmltools
import pandas as pd
import xgboost
from onnxmltools.convert.common.data_types import FloatTensorType as Floats
from skl2onnx import convert_sklearn, to_onnx
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_diabetes, load_iris
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    GradientBoostingClassifier,
    IsolationForest,
    RandomForestClassifier,
)
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler
from sklearn.svm import SVC

FOLDER = Path(__file__).parent
iris, diabetes = load_iris(), load_diabetes()
FLOWERS, KINDS = iris.data.astype(np.float32), iris.target
NAMES = iris.target_names[KINDS]
PATIENTS, PROGRESS = diabetes.data.astype(np.float32), diabetes.target
PLACES = [0, 40, 60, 110]


def save(name: str, model: Any, proto: Any, rows: Any) -> None:
    """Write a file and what its model says of some rows."""
    (FOLDER / f"{name}.onnx").write_bytes(proto.SerializeToString())
    is_frame = isinstance(rows, pd.DataFrame)
    answers = {
        "rows": rows.to_dict("records") if is_frame else rows.tolist(),
        "predict": model.predict(rows).tolist(),
    }
    if hasattr(model, "predict_proba"):
        answers["classes"] = [str(each) for each in model.classes_]
        answers["probabilities"] = model.predict_proba(rows).tolist()
    (FOLDER / f"{name}.json").write_text(json.dumps(answers) + "\n")


def of_scikit_learn(name: str, model: Any, rows: Any, labels: Any, **options: Any) -> None:
    """Fit, convert as the documentation says, and save."""
    model.fit(rows, labels)
    save(name, model, to_onnx(model, rows[:1], **options), rows[PLACES])


def of_another(name: str, model: Any, convert: Any, rows: Any, labels: Any) -> None:
    """Fit, convert by onnxmltools as its documentation says, and save."""
    model.fit(rows, labels)
    proto = convert(model, initial_types=[("input", Floats([None, rows.shape[1]]))])
    save(name, model, proto, rows[PLACES])


of_scikit_learn("logistic", LogisticRegression(max_iter=500), FLOWERS, KINDS)
of_scikit_learn("strings", LogisticRegression(max_iter=500), FLOWERS, NAMES)
of_scikit_learn("forest", RandomForestClassifier(5, random_state=0), FLOWERS, KINDS)
of_scikit_learn(
    "boosting", GradientBoostingClassifier(n_estimators=3, random_state=0), FLOWERS, KINDS
)
of_scikit_learn("neighbours", KNeighborsClassifier(), FLOWERS, NAMES)
of_scikit_learn("svc", SVC(probability=True, random_state=0), FLOWERS, KINDS)
of_scikit_learn("kmeans", KMeans(3, n_init=3, random_state=0), FLOWERS, KINDS)
of_scikit_learn("linear", LinearRegression(), PATIENTS, PROGRESS)
of_scikit_learn(
    "pipeline", make_pipeline(StandardScaler(), PCA(2), LogisticRegression()), FLOWERS, KINDS
)
of_scikit_learn(
    "isolation",
    IsolationForest(n_estimators=2, max_samples=16, random_state=0),
    FLOWERS,
    KINDS,
    target_opset={"": 18, "ai.onnx.ml": 3},
)

random = np.random.default_rng(0)
table = pd.DataFrame(
    {
        "age": random.integers(18, 80, 300),
        "income": random.normal(3000, 900, 300).astype("float32"),
        "city": random.choice(["Oslo", "Rome", "Paris"], 300),
        "job": random.choice(["cook", "nurse"], 300),
    }
)
buys = np.where((table.age > 40) ^ (table.city == "Rome"), "yes", "no")
for name, unknown in (("columns", "ignore"), ("columns_strict", "error")):
    steps = [
        ("numbers", StandardScaler(), ["age", "income"]),
        ("texts", OneHotEncoder(handle_unknown=unknown), ["city", "job"]),
    ]
    model = make_pipeline(ColumnTransformer(steps), LogisticRegression())
    model.fit(table, buys)
    save(name, model, to_onnx(model, table[:1]), table[:4])
steps = [("numbers", StandardScaler(), [0, 1]), ("texts", OrdinalEncoder(), [2, 3])]
model = make_pipeline(ColumnTransformer(steps), RandomForestClassifier(3, random_state=0))
model.fit(table.to_numpy(), buys)
types = [("num", FloatTensorType([None, 2])), ("cat", StringTensorType([None, 2]))]
save("grouped", model, convert_sklearn(model, initial_types=types), table.to_numpy()[:4])

booster, machine = {"n_estimators": 3}, {"n_estimators": 3, "num_leaves": 5, "verbose": -1}
of_another("xgb", xgboost.XGBClassifier(**booster), onnxmltools.convert_xgboost, FLOWERS, KINDS)
of_another(
    "xgb_regressor",
    xgboost.XGBRegressor(**booster, max_depth=3),
    onnxmltools.convert_xgboost,
    PATIENTS,
    PROGRESS,
)
of_another("lgbm", lightgbm.LGBMClassifier(**machine), onnxmltools.convert_lightgbm, FLOWERS, NAMES)
of_another(
    "lgbm_regressor",
    lightgbm.LGBMRegressor(**machine),
    onnxmltools.convert_lightgbm,
    PATIENTS,
    PROGRESS,
)
