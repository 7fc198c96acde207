"""Ordinary networks of one line: what people write that architectures of the table do not call.

`torch.export` takes each as it stands. Their operators are counted with those of the architectures
(`tests.breadth.operators`), and `tests/exporter/test_decomposed.py` says which of them are written
so that nobody has to trust the file.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

Call = Callable[[Tensor], Any]


class Calls(nn.Module):
    """A network that makes one call; its outputs are a tensor, or a tuple of some."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(x)


PLACES = torch.tensor([4, 0, 2])
TWICE = torch.tensor([1, 1])
TABLE = torch.linspace(-1, 1, 6)


def square(x: Tensor) -> Tensor:
    """Return a symmetric matrix that has an inverse."""
    return x.T @ x + torch.eye(6)


def write(x: Tensor, at: Any, value: float) -> Tensor:
    """Set elements as Python does."""
    copy = x * 1
    copy[at] = value
    return copy


def images(module: nn.Module, channels: int = 6) -> nn.Module:
    """Let a module of images take the rows."""
    return nn.Sequential(nn.Unflatten(1, (channels, 6 // channels, 1)), module)


IN_PLACE: dict[str, Call | nn.Module] = {
    "Dropout": nn.Dropout(0.3, inplace=True),
    "Dropout1d": nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Dropout1d(inplace=True)),
    "Dropout2d": images(nn.Dropout2d(inplace=True)),
    "AlphaDropout": nn.AlphaDropout(inplace=True),
    "FeatureAlphaDropout": images(nn.FeatureAlphaDropout(inplace=True)),
    "RReLU": nn.RReLU(inplace=True),
    "Threshold": nn.Threshold(0.2, -1, inplace=True),
    "Mish": nn.Sequential(nn.Linear(6, 2), nn.Mish(inplace=True)),
    "SiLU": nn.SiLU(inplace=True),
    "Hardswish": nn.Hardswish(inplace=True),
    "Hardsigmoid": nn.Hardsigmoid(inplace=True),
    "ReLU6": nn.ReLU6(inplace=True),
    "ELU": nn.ELU(inplace=True),
    "CELU": nn.CELU(inplace=True),
    "SELU": nn.SELU(inplace=True),
    "LeakyReLU": nn.LeakyReLU(inplace=True),
    "Hardtanh": nn.Hardtanh(inplace=True),
    "gelu_": lambda x: torch.ops.aten.gelu_(x * 2),
    "scatter_": lambda x: torch.zeros_like(x).scatter_(1, x.argsort(1), x),
    "scatter_add_": lambda x: torch.zeros_like(x).scatter_add_(1, x.argsort(1), x),
    "scatter_ of a number": lambda x: torch.zeros_like(x).scatter_(1, x.argmax(1, True), 1.0),
    "index_add_": lambda x: torch.zeros_like(x[0]).index_add_(0, TWICE, x[0, :2]) + x,
    "index_fill_": lambda x: (x + 0).index_fill_(1, PLACES, -1.0),
    "index_copy_": lambda x: (x + 0).index_copy_(1, PLACES, x[:, :3]),
    "index_put_": lambda x: (x + 0).index_put_((TWICE - 1, TWICE), x[0, :2]),
    "masked_fill_": lambda x: (x + 0).masked_fill_(x < 0, 2.0),
    "masked_scatter_": lambda x: (x + 0).masked_scatter_(x < 0, x),
    "put_": lambda x: (x + 0).put_(PLACES, x[0, :3]),
    "cumsum_": lambda x: (x * 2).cumsum_(1),
    "cumprod_": lambda x: (x * 2).cumprod_(1),
    "triu_": lambda x: torch.full((6, 6), float("-inf")).triu_(1).softmax(0) + x[:1],
    "tril_": lambda x: torch.ones(6, 6).tril_(-1) * x.sum(),
    "unsqueeze_": lambda x: (x + 1).unsqueeze_(1),
    "squeeze_": lambda x: (x + 1).unsqueeze(2).squeeze_(2),
    "transpose_": lambda x: (x + 1).transpose_(0, 1),
    "swapaxes_": lambda x: (x + 1).swapaxes_(0, 1),
    "fill_diagonal_": lambda x: (x @ x.T).fill_diagonal_(3.0),
    "addmm_": lambda x: (x @ x.T).addmm_(x, x.T, beta=0.5),
    "addcmul_": lambda x: (x + 1).addcmul_(x, x, value=0.5),
    "addcdiv_": lambda x: (x + 1).addcdiv_(x, x.abs() + 1),
    "baddbmm_": lambda x: torch.zeros(1, 6, 6).baddbmm_(x.T[None], x[None]),
    "lerp_": lambda x: (x + 1).lerp_(x, 0.3),
    "renorm_": lambda x: (x + 1).renorm_(2, 0, 1.0),
    "clamp_": lambda x: (x + 1).clamp_(-0.5, 0.5),
    "floor_divide_": lambda x: (x + 1).floor_divide_(0.7),
    "remainder_": lambda x: (x + 1).remainder_(0.7),
    "lt_": lambda x: (x + 1).lt_(1.0),
    "logical_not_": lambda x: (x > 0).logical_not_(),
    "bitwise_or_": lambda x: (x > 0).bitwise_or_(x < -1),
    "sort and fill_": lambda x: torch.empty(2, 6).fill_(2.0) + x.sort(1).values[:1],
    "zero_": lambda x: x.new_empty(6).zero_() + x,
    "copy_": lambda x: torch.zeros_like(x).copy_(x[:1]),
    "set a column": lambda x: write(x, (slice(None), 2), 0.0),
    "set by a mask": lambda x: write(x, x > 0, 0.0),
    "set a step": lambda x: write(x, (slice(None), slice(0, 6, 2)), 1.0),
    "detach_": lambda x: (x * 2).detach_() + x,
    "nan_to_num_": lambda x: (x / x.relu()).nan_to_num_(0.5),
    "sigmoid_ of a view": lambda x: (x * 1)[:, 1:4].sigmoid_(),
}
STATISTICS: dict[str, Call | nn.Module] = {
    "nanmean": lambda x: x.nanmean(1),
    "nansum": lambda x: x.nansum(1),
    "nanmedian": lambda x: x.nanmedian(1).values,
    "nanmedian of all": lambda x: x.nanmedian(),
    "nanquantile": lambda x: x.nanquantile(0.3, 1),
    "quantile": lambda x: x.quantile(torch.tensor([0.2, 0.7]), 1),
    "std_mean": lambda x: torch.std_mean(x, 1),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "aminmax": lambda x: tuple(torch.aminmax(x, dim=1)),
    "mode": lambda x: x.round().mode(1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "cummax": lambda x: x.cummax(1).values,
    "cummin": lambda x: x.cummin(1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "count_nonzero": lambda x: (x > 0).count_nonzero(1),
    "diff": lambda x: x.diff(dim=1),
    "dist": lambda x: torch.dist(x, x * 2),
    "histc": lambda x: torch.histc(x, 5, -2, 2),
    "bincount": lambda x: x[0].argsort().bincount(minlength=6),
    "trapezoid": lambda x: torch.trapezoid(x),
    "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "msort": torch.msort,
    "bucketize": lambda x: torch.bucketize(x, TABLE),
    "searchsorted": lambda x: torch.searchsorted(TABLE, x),
    "isin": lambda x: torch.isin(x.round(), TABLE.round()),
    "gradient": lambda x: torch.gradient(x, dim=1)[0],
    "unique": lambda x: torch.unique(x.round()),
    "unique with counts": lambda x: torch.unique(x.round(), return_inverse=True)[1],
    "unique of rows": lambda x: torch.unique(x.round(), dim=0),
    "unique_consecutive": lambda x: torch.unique_consecutive(x.round()),
}
SPECIAL: dict[str, Call | nn.Module] = {
    "expm1": torch.special.expm1,
    "erfc": torch.special.erfc,
    "erfcx": torch.special.erfcx,
    "erfinv": lambda x: torch.special.erfinv(x.tanh() * 0.9),
    "logit": lambda x: torch.special.logit(x.sigmoid()),
    "torch.logit": lambda x: torch.logit(x.sigmoid(), eps=1e-3),
    "special.softmax": lambda x: torch.special.softmax(x, 1),
    "special.log_softmax": lambda x: torch.special.log_softmax(x, 1),
    "special.logsumexp": lambda x: torch.special.logsumexp(x, 1),
    "i0": torch.special.i0,
    "i0e": torch.special.i0e,
    "i1": torch.special.i1,
    "log_ndtr": torch.special.log_ndtr,
    "ndtr": torch.special.ndtr,
    "ndtri": lambda x: torch.special.ndtri(x.sigmoid()),
    "xlog1py": lambda x: torch.special.xlog1py(x, x.abs()),
    "gammaln": lambda x: torch.special.gammaln(x.abs() + 1),
    "digamma": lambda x: torch.digamma(x.abs() + 1),
    "polygamma": lambda x: torch.polygamma(1, x.abs() + 1),
    "mvlgamma": lambda x: torch.mvlgamma(x.abs() + 3, 2),
    "entr": lambda x: torch.special.entr(x.abs()),
    "sinc": torch.sinc,
    "copysign": lambda x: torch.copysign(x, -x),
    "heaviside": lambda x: torch.heaviside(x, x.abs()),
    "frexp": lambda x: torch.frexp(x)[0],
    "ldexp": lambda x: torch.ldexp(x, PLACES[:1]),
    "frac": torch.frac,
    "nextafter": lambda x: torch.nextafter(x, x + 1),
    "hypot": lambda x: torch.hypot(x, x + 1),
    "logaddexp": lambda x: torch.logaddexp(x, -x),
    "float_power": lambda x: torch.float_power(x.abs(), 1.5),
    "shift": lambda x: (x * 8).long() >> 1,
    "gcd": lambda x: torch.gcd((x * 8).long(), PLACES[:1]),
}
WAVES: dict[str, Call | nn.Module] = {
    "hann_window": lambda x: x * torch.hann_window(6),
    "hamming_window": lambda x: x * torch.hamming_window(6, periodic=False),
    "blackman_window": lambda x: x * torch.blackman_window(6),
    "bartlett_window": lambda x: x * torch.bartlett_window(6),
    "kaiser_window": lambda x: x * torch.kaiser_window(6, False, 5.0),
    "windows.hann": lambda x: x * torch.signal.windows.hann(6),
    "fftfreq": lambda x: x * torch.fft.fftfreq(6),
    "rfftfreq": lambda x: torch.fft.rfft(x).abs() * torch.fft.rfftfreq(6, 0.1),
    "fft": lambda x: torch.fft.fft(x).real,
    "ifft": lambda x: torch.fft.ifft(x).imag,
    "fft2": lambda x: torch.fft.fft2(x).abs(),
    "fftn": lambda x: torch.fft.fftn(x).real,
    "ifftn": lambda x: torch.fft.ifftn(x).real,
    "rfft": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "rfft2": lambda x: torch.fft.rfft2(x).abs(),
    "rfftn": lambda x: torch.fft.rfftn(x, dim=(1,)).abs(),
    "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=6),
    "irfft2": lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(4, 6)),
    "hfft": lambda x: torch.fft.hfft(torch.complex(x, x)),
    "ihfft": lambda x: torch.fft.ihfft(x).real,
    "fftshift": torch.fft.fftshift,
    "ifftshift": torch.fft.ifftshift,
    "stft": lambda x: torch.stft(x, 4, 2, window=torch.hann_window(4), return_complex=True).abs(),
    "polar": lambda x: torch.polar(x.abs(), x).imag,
    "complex": lambda x: torch.complex(x, -x).abs(),
    "angle": lambda x: torch.complex(x, x * 2).angle(),
    "sgn": lambda x: torch.complex(x, x * 2).sgn().real,
    "view_as_complex": lambda x: (torch.view_as_complex(x.view(-1, 3, 2)) * 1j).real,
}
MATRICES: dict[str, Call | nn.Module] = {
    "inv": lambda x: torch.linalg.inv(square(x)),
    "inv_ex": lambda x: torch.linalg.inv_ex(square(x))[0],
    "inverse": lambda x: square(x).inverse(),
    "solve": lambda x: torch.linalg.solve(square(x), x.T),
    "cholesky": lambda x: torch.linalg.cholesky(square(x)),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(square(x))[0],
    "torch.cholesky": lambda x: torch.cholesky(square(x)),
    "cholesky_solve": lambda x: torch.cholesky_solve(x.T, square(x).cholesky()),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(square(x).cholesky()),
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False)[1],
    "torch.svd": lambda x: torch.svd(x)[1],
    "svdvals": torch.linalg.svdvals,
    "qr": lambda x: torch.linalg.qr(x)[1].abs(),
    "eigh": lambda x: torch.linalg.eigh(square(x))[0],
    "eigvalsh": lambda x: torch.linalg.eigvalsh(square(x)),
    "eigvals": lambda x: torch.linalg.eigvals(square(x)).real.sort().values,
    "det": lambda x: torch.linalg.det(square(x)),
    "torch.det": lambda x: torch.det(square(x)),
    "slogdet": lambda x: torch.linalg.slogdet(square(x))[1],
    "logdet": lambda x: torch.logdet(square(x)),
    "lu": lambda x: torch.linalg.lu(square(x))[2],
    "lu_factor": lambda x: torch.linalg.lu_factor(square(x))[0],
    "lu_solve": lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(square(x)), x.T),
    "matrix_exp": lambda x: torch.matrix_exp(x.T @ x / 9),
    "matrix_power": lambda x: torch.linalg.matrix_power(square(x), 3),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "matrix_rank": lambda x: torch.linalg.matrix_rank(square(x)),
    "cond": lambda x: torch.linalg.cond(square(x)),
    "pinv": torch.linalg.pinv,
    "torch.pinverse": lambda x: torch.pinverse(square(x)),
    "solve_triangular": lambda x: torch.linalg.solve_triangular(square(x).tril(), x.T, upper=False),
    "triangular_solve": lambda x: torch.triangular_solve(x.T, square(x).triu())[0],
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x.T, x]),
    "vecdot": lambda x: torch.linalg.vecdot(x, x + 1),
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 3:]),
    "householder_product": lambda x: torch.linalg.householder_product(square(x), x[0]),
    "vander": lambda x: torch.linalg.vander(x[:, :3]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "pdist": F.pdist,
    "block_diag": lambda x: torch.block_diag(x, x[:1]),  # type: ignore[no-untyped-call]
    "kron": lambda x: torch.kron(x, x[:1]),
    "tensordot": lambda x: torch.tensordot(x, x.T, 1),
    "einsum": lambda x: torch.einsum("bi,bj->bij", x, x),
    "trace": lambda x: square(x).trace(),
    "chain_matmul": lambda x: torch.chain_matmul(x, x.T, x),  # type: ignore[no-untyped-call]
    "outer": lambda x: torch.outer(x[0], x[1]),
    "inner": lambda x: torch.inner(x, x),
    "addr": lambda x: square(x).addr(x[0], x[1]),
}
PLACING: dict[str, Call | nn.Module] = {
    "take": lambda x: torch.take(x, PLACES),
    "take_along_dim": lambda x: x.take_along_dim(x.argsort(1), 1),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "nonzero": lambda x: (x > 0).nonzero()[:, 1],
    "as_strided": lambda x: (x * 1).as_strided((2, 3), (6, 1), 1),
    "windows by as_strided": lambda x: x.contiguous().as_strided((4, 3), (1, 1)) * 2,
    "unfold": lambda x: x.unfold(1, 3, 2),
    "index_reduce": lambda x: torch.index_reduce(x, 1, PLACES, x[:, :3], "mean"),
    "scatter_reduce": lambda x: x.scatter_reduce(1, x.argsort(1), x, "amax"),
    "diagonal_scatter": lambda x: square(x).diagonal_scatter(x[0]),
    "select_scatter": lambda x: x.select_scatter(x[:, 0], 1, 2),
    "slice_scatter": lambda x: x.slice_scatter(x[:, :2], 1, 1, 3),
    "diag_embed": lambda x: x.diag_embed(),
    "diagflat": lambda x: x[0].diagflat(),
    "tril_indices": lambda x: square(x)[tuple(torch.tril_indices(6, 6))],
    "cartesian_prod": lambda x: torch.cartesian_prod(x[0], x[1]),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
    "torch.vander": lambda x: torch.vander(x[0], 3),
    "roll": lambda x: x.roll((1, 2), (0, 1)),
    "rot90": lambda x: x.rot90(),
    "flip": lambda x: x.flip(1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "tensor_split": lambda x: x.tensor_split(4, 1)[1],
    "hsplit": lambda x: x.hsplit(3)[1],
    "column_stack": lambda x: torch.column_stack([x, x[:, :1]]),
    "one_hot": lambda x: F.one_hot(x.argmax(1), 6),
    "segment_reduce": lambda x: torch.segment_reduce(x[0], "sum", lengths=torch.tensor([2, 4])),
    "sparse.mm": lambda x: torch.sparse.mm(torch.eye(6).to_sparse(), x.T),
}
LAYERS: dict[str, Call | nn.Module] = {
    "LSTMCell": nn.LSTMCell(6, 4),
    "GRUCell": nn.GRUCell(6, 4),
    "RNNCell": nn.RNNCell(6, 4),
    "Bilinear": lambda x: F.bilinear(x, x, torch.ones(2, 6, 6)),
    "LPPool1d": nn.Sequential(nn.Unflatten(1, (1, 6)), nn.LPPool1d(2, 2)),
    "ChannelShuffle": images(nn.ChannelShuffle(3)),
    "ConstantPad2d": nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.ConstantPad2d(1, 2.0)),
    "GroupNorm": nn.GroupNorm(3, 6),
    "InstanceNorm1d": nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True)),
    "LocalResponseNorm": images(nn.LocalResponseNorm(2)),
    "RMSNorm": nn.RMSNorm(6),
    "EmbeddingBag": lambda x: F.embedding_bag(x.argsort(1), TABLE.view(6, 1)),
    "MaxUnpool1d": lambda x: F.max_unpool1d(
        *F.max_pool1d(x[:, None], 2, return_indices=True), (2,)
    ),
    "MaxUnpool2d": lambda x: F.max_unpool2d(
        *F.max_pool2d(x.view(-1, 1, 2, 3)[..., :2], 2, return_indices=True), (2, 2)
    ),
    "CosineSimilarity": lambda x: F.cosine_similarity(x, x + 1),
    "PairwiseDistance": lambda x: F.pairwise_distance(x, x * 2),
    "GLU": nn.GLU(),
    "Softmin": nn.Softmin(1),
    "Softshrink": nn.Softshrink(),
    "fold": lambda x: F.fold(x.view(-1, 2, 3).repeat(1, 2, 1)[..., :2], (2, 3), 2),
    "grid_sample": lambda x: F.grid_sample(
        x.view(-1, 1, 2, 3), x.tanh().view(-1, 1, 3, 2), align_corners=False
    ),
    "affine_grid": lambda x: F.affine_grid(x.view(-1, 2, 3), [2, 1, 2, 2], align_corners=False),
    "scaled_dot_product": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "mse_loss": lambda x: F.mse_loss(x, x * 2, reduction="none"),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x * 3, reduction="none").sum(1),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmin(1), reduction="none"),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 0).float()),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), (x * 2).softmax(1), reduction="none"),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x + 1, x[:, 0].sign()),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x * 2, x * 3),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True).sum(1),
    "normal": lambda x: torch.normal(x, 1.0) * 0 + x,
}
NETWORKS = IN_PLACE | STATISTICS | SPECIAL | WAVES | MATRICES | PLACING | LAYERS
"""Name → network of `x:float32[2, 6]`; most take any number of rows."""


def network(name: str) -> nn.Module:
    """Return a network, in evaluation mode."""
    found = NETWORKS[name]
    return (found if isinstance(found, nn.Module) else Calls(found)).eval()
