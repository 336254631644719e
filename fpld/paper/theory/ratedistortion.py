"""Reverse water-filling: the least loss of any code of independent Gaussian coordinates.

A coordinate with residual variance s2 and weight w costs w D at distortion D and takes 1/2 log2(s2 / D) bits, so the
least weighted loss at a rate has w D = min(w s2, level) everywhere (Cover and Thomas, 10.3.3): only the products w s2
count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld import _check
from fpld.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fpld.types import Floats


def reverse_water_filling(products: ArrayLike, rate: float) -> float:
    """Return the least mean of w D at `rate` bits per coordinate, for products w s2 of weight and variance.

    >>> reverse_water_filling([1.0, 1.0], rate=1.0)
    0.25
    """
    products = _products(products)
    rate = _check.real("rate", rate, least=0.0)
    # Sorted, the k largest are above the level: mean over all of 1/2 log2(product / level) is the rate.
    logs = np.log2(products[products > 0])
    if logs.size == 0:
        return 0.0
    counts = np.arange(1, logs.size + 1)
    levels = (np.cumsum(logs) - 2 * rate * products.size) / counts
    above = int(np.nonzero(levels <= logs)[0].max()) if rate > 0 else 0
    level = 2.0 ** levels[above] if rate > 0 else products[0]
    return float(np.minimum(products, level).mean())


def rate_for(products: ArrayLike, loss: float) -> float:
    """Return the least bits per coordinate at which the mean of w D is `loss`; 0 if it is so without a bit.

    >>> rate_for([1.0, 1.0], loss=0.25)
    1.0
    """
    products = _products(products)
    loss = _check.real("loss", loss, above=0.0)
    if loss >= products.mean():
        return 0.0
    # The mean of min(product, level) is piecewise linear in the level: the k largest are cut.
    below = products.sum() - np.cumsum(products)
    counts = np.arange(1, products.size + 1)
    levels = (loss * products.size - below) / counts
    following = np.append(products[1:], 0.0)
    cut = int(np.nonzero(levels >= following)[0].min())
    return float((0.5 * np.log2(products[: cut + 1] / levels[cut])).sum() / products.size)


def _products(products: ArrayLike) -> Floats:
    """Return the products, the largest first."""
    array = np.asarray(products, np.float64).ravel()
    if array.size == 0 or not np.isfinite(array).all() or (array < 0).any():
        raise InputError("products must be finite numbers of at least 0, and not empty")
    return np.sort(array)[::-1]
