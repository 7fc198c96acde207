"""Shapley values of tree ensembles, exact: what each leaf has is shared among who leads to it.

An ONNX file of scikit-learn, XGBoost or LightGBM is one node, TreeEnsembleClassifier or
TreeEnsembleRegressor (https://onnx.ai/onnx/operators/#ai-onnx-ml), behind steps that take each
column by itself. Explained is the sum of its trees: where the node makes probabilities of it, the
margin before. The file does not hold how many rows of training went which way, so that there is no
path-dependent expectation: what a feature is compared with are the rows of the baseline.
"""

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modelyard.handlers.errors import BadInput, TwinDiffers
from modelyard.handlers.explain.attribute.attribution import (
    Attribution,
    AttributionRequest,
    chunks,
    outputs_of,
)
from modelyard.handlers.explain.attribute.method import Groups, Method, Shapes
from modelyard.handlers.explain.attribute.windows import real_dtype
from modelyard.handlers.models.backends import Artifact
from modelyard.plugins.tasks.methods.features import features_of
from modelyard.plugins.tasks.methods.shapley import set_error

if TYPE_CHECKING:
    from modelyard.handlers.explain.request.targets import ExplainedModel

Array = npt.NDArray[Any]
_Scale = Callable[[Array], Array]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

MOST_AT_ONCE = 1 << 20
"""Conditions of paths that are looked at in one go, of so many rows of the baseline."""

_ROUNDING = 1e-5
"""How far a runtime's sum of float32 may be off, as a share of the sizes that it adds up."""
_LINKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "LOGISTIC": torch.sigmoid,
    "Sigmoid": torch.sigmoid,
    "SOFTMAX": partial(torch.softmax, dim=1),
    "Softmax": partial(torch.softmax, dim=1),
}
"""Post-transform of the node, or operator behind it → what it makes of the sums (N, K)."""
_BRANCHES: Mapping[str, Callable[[Array, Array], Any]] = {
    "BRANCH_LEQ": np.less_equal,
    "BRANCH_LT": np.less,
    "BRANCH_GTE": np.greater_equal,
    "BRANCH_GT": np.greater,
    "BRANCH_EQ": np.equal,
    "BRANCH_NEQ": np.not_equal,
}


@dataclass(frozen=True)
class Trees:
    """All nodes of an ensemble, and the way from a root to each leaf."""

    modes: npt.NDArray[np.str_]
    """(N,) how a node compares its column with its threshold; LEAF of one that does not."""
    columns: npt.NDArray[np.int64]
    """(N,)"""
    thresholds: Array
    """(N,) in the dtype that the file has them in."""
    missing: Bools
    """(N,) whether a missing value goes the way of true."""
    leaves: npt.NDArray[np.int64]
    """(P,) of each step of all ways: which leaf it leads to, one after the other."""
    steps: npt.NDArray[np.int64]
    """(P,) and the node where it is decided."""
    sides: Bools
    """(P,) and whether it goes on where the comparison is true."""
    weights: Floats
    """(L, T) what each leaf adds to each sum."""
    base: Floats
    """(T,) what each sum begins with."""

    def ways(self, rows: Array) -> Bools:
        """Return of rows (R, F) what each node decides: (R, N)."""
        values = rows[:, self.columns]
        found = np.isnan(values) & self.missing
        for mode, compare in _BRANCHES.items():
            at = self.modes == mode
            found[:, at] |= compare(values[:, at], self.thresholds[at])
        return found

    def sums(self, rows: Array) -> tuple[Floats, Floats]:
        """Return of rows (R, F) the sums, and the sizes of what is added up: (R, T) each."""
        leads = np.ones((len(rows), len(self.weights)), bool)
        if len(self.steps):
            begins = np.flatnonzero(np.diff(self.leaves, prepend=-1))
            meets = self.ways(rows)[:, self.steps] == self.sides
            leads[:, self.leaves[begins]] = np.logical_and.reduceat(meets, begins, axis=1)
        return leads @ self.weights + self.base, leads @ abs(self.weights) + abs(self.base)

    def shapley(self, row: Array, starts: Array, players: Array, weights: Floats) -> Floats:
        """Return the Shapley values (B, G) of players, for each row to start from.

        A set of players has the worth that the trees give where its columns are as in the row, the
        others as in the start. To a leaf leads the set, if it leads there, that holds all players
        who go there as in the row alone, and none who does as in the start alone: `u` and `v` of
        them. Each of the former gets (u − 1)! v! / (u + v)! of what the leaf has, each of the
        latter loses u! (v − 1)! / (u + v)!.

        Args:
            row: (F,) what is explained.
            starts: (B, F)
            players: (F,) whose each column is.
            weights: (L,) what each leaf has.

        Source: Lundberg et al. 2020, algorithm 3 (interventional),
        https://doi.org/10.1038/s42256-019-0138-9
        """
        found = np.zeros((len(starts), int(players.max()) + 1))
        if not len(self.leaves):
            return found
        # All conditions that a way has for one player are one.
        of = players[self.columns[self.steps]]
        order = np.lexsort((of, self.leaves))
        leaves, of, steps = self.leaves[order], of[order], self.steps[order]
        firsts = np.flatnonzero(np.diff(leaves, prepend=-1) | np.diff(of, prepend=-1))
        owners, ends = of[firsts], leaves[firsts]
        begins = np.flatnonzero(np.diff(ends, prepend=-1))
        sizes = np.diff(begins, append=len(ends))
        gains = weights[ends[begins]]
        gain, loss = _shares(int(sizes.max()))

        def meets(rows: Array) -> Bools:
            """Return of rows (R, F) whether each meets each condition: (R, C)."""
            goes = self.ways(rows)[:, steps] == self.sides[order]
            return np.logical_and.reduceat(goes, firsts, axis=1)

        here = meets(row[None])
        for chunk in chunks(len(starts), max(1, MOST_AT_ONCE // len(steps))):
            there = meets(starts[chunk])
            leads = np.logical_and.reduceat(here | there, begins, axis=1)
            # Most leaves are out of reach: what follows is of the others alone.
            rows, conditions = np.nonzero(leads.repeat(sizes, 1))
            inside = here[0, conditions] & ~there[rows, conditions]
            outside = there[rows, conditions] & ~here[0, conditions]
            which = np.nonzero(leads)[1]
            first = np.cumsum(sizes[which]) - sizes[which]
            u, v = (np.add.reduceat(each, first, dtype=np.int64) for each in (inside, outside))
            wins, loses = (
                (gains[which] * share[u, v]).repeat(sizes[which]) for share in (gain, loss)
            )
            count = found.shape[1]
            each = wins * inside - loses * outside
            sums = np.bincount(rows * count + owners[conditions], each, len(there) * count)
            found[chunk] = sums.reshape(-1, count)
        return found


def _shares(most: int) -> tuple[Floats, Floats]:
    """Return what one of `u` gets and one of `v` loses, by u and v: (U, V) each."""
    gain, loss = np.zeros((2, most + 1, most + 1))
    for u in range(most + 1):
        for v in range(most + 1 - u):
            whole = math.factorial(u + v)
            gain[u, v] = math.factorial(u - 1) * math.factorial(v) / whole if u else 0
            loss[u, v] = math.factorial(u) * math.factorial(v - 1) / whole if v else 0
    return gain, loss


class TreeArtifact(Artifact):
    """An artifact whose output comes of trees, as what gives their sums.

    Of each row that it is asked about it makes sure that what the artifact gives is what becomes of
    its own reading of the trees.

    Args:
        artifact: an ONNX file.
        name: name of the output; None for the first of real numbers.

    Raises:
        BadInput: the output comes of something else.
    """

    def __init__(self, artifact: Artifact, name: str | None) -> None:
        super().__init__(artifact.format, self._sums, artifact.inputs, artifact.device)
        self.file, self.path = artifact.file, artifact.path
        self._artifact = artifact
        node, self._place, self.link, self.steps = _find(artifact, name)
        """Steps before the trees, which each take rows (R, F)."""
        self.trees = _read(node)
        sums, is_classifier = len(self.trees.base), node.op_type.endswith("Classifier")
        self.signs = np.eye(sums)
        """(T, K) what each sum counts in each number of the output."""
        self._first = 0.0
        if is_classifier and sums == 1:
            # onnxruntime makes two classes of one sum: the second has it, the first the rest.
            self.signs = np.array([[-1.0, 1.0]])
            self.link = torch.sigmoid if self.link is torch.sigmoid else None
            self._first = float(self.link is None and bool((self.trees.weights >= 0).all()))

    def scale(self, rows: Array) -> Array:
        """Return rows (R, F) as the trees read them."""
        return reduce(lambda each, step: step(each), self.steps, rows)

    def _sums(self, row: Tensor) -> Tensor:
        output = self._artifact(row)
        served = outputs_of(output if isinstance(output, Tensor) else output[self._place])
        sums, sizes = self.trees.sums(self.scale(row.numpy()))
        found = torch.from_numpy(sums @ self.signs)
        found[:, 0] += self._first
        size = torch.from_numpy(sizes @ abs(self.signs)).clip(1 if self.link else 0)
        given = self.link(found) if self.link else found
        if served.shape != given.shape or bool((served - given).abs().gt(_ROUNDING * size).any()):
            raise TwinDiffers(
                f"for this input {self.file} gives {served.flatten()[:4].tolist()}, and its trees "
                f"add up to {given.flatten()[:4].tolist()}: expected the same, so tree_shap would "
                "explain something else; choose kernel_shap"
            )
        return found if self.link else served


def of_trees(version: "ExplainedModel") -> "ExplainedModel":
    """Return the model as one that gives the sums of its trees.

    Raises:
        BadInput: its output comes of something else.
    """
    artifact = _opened(version.artifact, version.output_name)
    found = replace(version, artifact=artifact, twin=None, agreement=None, score=outputs_of)
    if artifact.link is None:
        return found
    return replace(found, probabilities=artifact.link, is_of_probabilities=False)


def suits(artifact: Artifact, name: str | None) -> bool:
    """Return whether an output of an artifact is what trees add up to."""
    try:
        _opened(artifact, name)
    except BadInput:
        return False
    return True


_opened = lru_cache(8)(TreeArtifact)


def cuts_of(artifact: Artifact, name: str | None) -> Mapping[int, Array] | None:
    """Return the first numbers of all stretches of each column in which no node tells two apart.

    None where the output does not come of trees alone, which read the columns as they are.
    """
    if not suits(artifact, name) or _opened(artifact, name).steps:
        return None
    trees = _opened(artifact, name).trees
    values = trees.thresholds.astype(np.float32)
    behind = np.nextafter(values, np.float32(np.inf))
    begins = {"BRANCH_LT": [values], "BRANCH_GTE": [values], "BRANCH_LEQ": [behind],
              "BRANCH_GT": [behind], "LEAF": []}  # fmt: skip
    found: dict[int, set[Any]] = {}
    for at, mode in enumerate(trees.modes):
        each = begins.get(str(mode), [values, behind])
        found.setdefault(int(trees.columns[at]), set()).update(firsts[at] for firsts in each)
    return {at: np.array(sorted(each), np.float32) for at, each in found.items()}


def _find(
    artifact: Artifact, name: str | None
) -> tuple[Any, int, Callable[[Tensor], Tensor] | None, list[_Scale]]:
    """Return the node of an output's trees, the output's place, the link and what rows become."""
    import onnx

    if artifact.format != "onnx" or artifact.path is None:
        raise BadInput(
            f"{artifact.file} holds {artifact.format}; tree_shap reads the trees of an ONNX file: "
            "choose kernel_shap"
        )
    graph = onnx.GraphProto()
    with artifact.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
        # Of a large file of something else the weights are not read.
        if text.find(b"TreeEnsemble") >= 0:
            graph = onnx.load(artifact.path, load_external_data=False).graph
    makers = {output: node for node in graph.node for output in node.output}
    constants = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    real = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
    names = [each.name for each in graph.output]
    numbers = (each.name for each in graph.output if each.type.tensor_type.elem_type in real)
    name = name or next(numbers, "")

    def fail(node: Any) -> BadInput:
        what = f"{node.op_type} behind or before trees" if node is not None else "no trees at all"
        return BadInput(
            f'output "{name}" comes of {what}; tree_shap explains a TreeEnsembleClassifier or '
            "TreeEnsembleRegressor of one input, each column taken by itself before it: choose "
            "kernel_shap"
        )

    link, value = None, name
    while not (node := makers.get(value)) or not node.op_type.startswith("TreeEnsemble"):
        if node is None:
            raise fail(None)
        ones = [constants.get(each) for each in node.input[1:]]
        is_same = node.op_type in ("Identity", "Cast") or (
            node.op_type == "Mul" and all(each is not None and (each == 1).all() for each in ones)
        )
        if not is_same:
            link = link or _LINKS.get(node.op_type)
            if link is None or node.op_type not in _LINKS:
                raise fail(node)
        value = node.input[0]
    given = _attributes(node)
    transform = given.get("post_transform", b"NONE").decode()
    link = link or _LINKS.get(transform)
    is_sum = given.get("aggregate_function", b"SUM") in (b"SUM", b"AVERAGE")
    if node.op_type == "TreeEnsemble" or not is_sum or not (link or transform == "NONE"):
        raise fail(node)
    steps: list[_Scale] = []
    value = node.input[0]
    while before := makers.get(value):
        step = _STEPS.get(before.op_type)
        if step is None:
            raise fail(before)
        steps.insert(0, partial(step, _attributes(before)))
        value = before.input[0]
    if [value] != [each.name for each in graph.input if each.name not in constants]:
        raise fail(None)
    return node, names.index(name), link, steps


def _attributes(node: Any) -> dict[str, Any]:
    import onnx

    found = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return {
        name.removesuffix("_as_tensor"): onnx.numpy_helper.to_array(value)
        if isinstance(value, onnx.TensorProto)
        else value
        for name, value in found.items()
    }


def _scaled(given: Mapping[str, Any], rows: Array) -> Array:
    offset, scale = (np.asarray(given[name], rows.dtype) for name in ("offset", "scale"))
    scaled: Array = (rows - offset) * scale
    return scaled


def _imputed(given: Mapping[str, Any], rows: Array) -> Array:
    missing = given.get("replaced_value_float", math.nan)
    is_missing = np.isnan(rows) if math.isnan(missing) else rows == missing
    return np.where(is_missing, np.asarray(given["imputed_value_floats"], rows.dtype), rows)


def _cast(given: Mapping[str, Any], rows: Array) -> Array:
    import onnx

    return rows.astype(onnx.helper.tensor_dtype_to_np_dtype(given["to"]))


_STEPS: Mapping[str, Callable[[Mapping[str, Any], Array], Array]] = {
    "Scaler": _scaled, "Imputer": _imputed, "Cast": _cast, "Identity": lambda _, rows: rows
}  # fmt: skip
"""Operator before the trees → what it makes of rows (R, F), column by column."""


def _read(node: Any) -> Trees:
    """Return the trees of a node as arrays."""
    given = _attributes(node)
    is_classifier = node.op_type.endswith("Classifier")
    prefix = "class" if is_classifier else "target"
    modes = np.array([each.decode() for each in given["nodes_modes"]])
    roots, numbers = (given[f"nodes_{name}"] for name in ("treeids", "nodeids"))
    places = {key: at for at, key in enumerate(zip(roots, numbers, strict=True))}
    is_leaf = modes == "LEAF"
    above: dict[int, tuple[int, bool]] = {}
    for at in np.flatnonzero(~is_leaf).tolist():
        for side, name in ((True, "true"), (False, "false")):
            above[places[roots[at], given[f"nodes_{name}nodeids"][at]]] = (at, side)
    leaves = np.flatnonzero(is_leaf).tolist()
    flat = []
    for leaf, at in enumerate(leaves):
        while at in above:
            at, side = above[at]
            flat.append((leaf, at, side))
    ways = np.array(flat, dtype=np.int64).reshape(-1, 3)
    ids, given_weights = (np.asarray(given[f"{prefix}_{name}"]) for name in ("ids", "weights"))
    sums = int(given.get("n_targets", 1))
    if is_classifier:
        sums = len(given.get("classlabels_int64s") or given["classlabels_strings"])
        if sums == 2 and len(np.unique(ids)) == 1:  # one sum for both
            sums, ids = 1, np.zeros_like(ids)
    base = np.zeros(sums)
    stated = np.asarray(given.get("base_values", ()), np.float64)
    base += stated if len(stated) == sums else 0
    weights = np.zeros((len(modes), sums))
    at_leaf = [
        places[key]
        for key in zip(*(given[f"{prefix}_{name}"] for name in ("treeids", "nodeids")), strict=True)
    ]
    np.add.at(weights, (np.array(at_leaf), ids), given_weights)
    if given.get("aggregate_function") == b"AVERAGE":
        weights /= len(set(roots))
    return Trees(
        modes,
        np.asarray(given["nodes_featureids"], np.int64),
        np.asarray(given["nodes_values"]),
        np.asarray(given.get("nodes_missing_value_tracks_true") or np.zeros(len(modes)), bool),
        ways[:, 0],
        ways[:, 1],
        ways[:, 2].astype(bool),
        weights[leaves],
        base,
    )


def tree_shap(
    request: AttributionRequest, *, artifact: TreeArtifact, shapes: Shapes, groups: Groups = ()
) -> Attribution:
    """Return the exact Shapley values of features, each shared evenly among its values.

    A feature's worth is what the trees give with it as in the input, in the mean over the rows of
    the baseline: the same game as of `kernel_shap`, without a draw and without asking the model.

    Args:
        request: request of any number of explanations.
        artifact: what is explained.
        shapes: shapes as in `feature_ablation`.
        groups: groups as in `occlusion`.

    Raises:
        BadInput: what is asked for is not what trees add up to.
    """
    forward = request.forward
    if forward.function is not None and artifact.link is not None:
        raise BadInput(
            "output is probability; tree_shap explains what trees add up to, the margin before the "
            "probability: expected logit, or the method kernel_shap"
        )
    features = features_of(request.inputs, shapes, groups)
    players = features.masks[0].numpy()
    scale, (inputs,) = artifact.scale, request.inputs
    found, set_errors = [], []
    for at, (starts,) in enumerate(request.baseline_sets):
        request.between_chunks()
        places = forward.targets[at].reshape(-1)
        counts = torch.ones(len(places)) if forward.weights is None else forward.weights[at]
        signs = artifact.signs[:, places.numpy()] @ counts.double().numpy()
        row, others = scale(inputs[at : at + 1].numpy())[0], scale(starts.numpy())
        values = artifact.trees.shapley(row, others, players, artifact.trees.weights @ signs)
        each = torch.from_numpy(values.mean(0)) / features.sizes
        found.append(features.spread(each)[0].to(real_dtype(inputs)))
        set_errors.append(set_error(values.T))
    attributions = torch.stack(found)
    return Attribution(
        (attributions,),
        torch.zeros(len(request), dtype=torch.int64),
        (torch.zeros_like(attributions),),
        # What is read is added up in float64, what is served in float32.
        _ROUNDING * (request.f_input.abs() + request.f_baseline.abs()),
        set_error=torch.cat(set_errors),
    )


TREE_SHAP = Method(
    tree_shap,
    ("errors",),
    needs_gradients=False,
    uses_baseline=True,
    adds_up=True,
    needs_windows=True,
    takes_sets=True,
    stand_in=of_trees,
    suits=suits,
)
