"""The signature anywhere, the numbers where there is a GPU."""

import numpy as np
import pytest
import scale_add

from kernel_hub import KernelHubError, driver


def test_signature() -> None:
    expected = "scale_add_fp32(float* out, float* x, int64_t num_elements)"
    assert scale_add.function().signature == expected


@pytest.mark.parametrize("num_elements", [0, 1, 255, 256, 257, 100_003])
def test_numbers(num_elements: int) -> None:
    try:
        driver.get().primary_context(0)
    except KernelHubError as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")
    x = np.random.default_rng(0).standard_normal(num_elements, dtype=np.float32)
    np.testing.assert_allclose(scale_add.scale_add(x), 2 * x + 1, rtol=1e-6)
