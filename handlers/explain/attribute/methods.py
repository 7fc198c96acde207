"""The attribution methods that can be asked for: core's own, and those of plug-ins.

What captum (https://captum.ai) has too is compared with it in tests. It is not imported here: that
takes half a second, most of it matplotlib's. Its other rules of quadrature are not offered, as its
trapezoid's weights sum to 1 − 1/n.
"""

from collections.abc import Mapping

from modelyard.base.plugins import registered
from modelyard.handlers.explain.attribute.method import STEPS, Measure, Method
from modelyard.handlers.explain.attribute.path import integrated_gradients
from modelyard.handlers.explain.attribute.windows import feature_ablation, occlusion

METHODS: Mapping[str, Method] = {
    "integrated_gradients": Method(integrated_gradients, STEPS, uses_baseline=True, adds_up=True),
    **{
        run.__name__: Method(
            run, options, needs_gradients=False, uses_baseline=True, needs_windows=True,
            repeats=True,
        )
        for run, options in ((feature_ablation, ("window",)), (occlusion, ("window", "stride")))
    },
    **{name: entry.load() for name, entry in registered("methods").items()},
}  # fmt: skip

MEASURES: Mapping[str, Measure] = {
    name: entry.load() for name, entry in registered("measures").items()
}
