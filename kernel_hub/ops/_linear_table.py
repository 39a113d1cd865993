"""What was measured of linear on an H200: data (bench_linear.py --tune makes it anew)."""

# Variant of linear_sm90.cu -> (microseconds a step of 64 elements of k, microseconds a tile).
HOPPER_COSTS: dict[str, tuple[float, float]] = {
    "128x256_c21": (0.648, 2.6),
    "128x320_c21": (0.844, 2.8),
    "128x224_c21": (0.595, 2.4),
    "128x192_c21": (0.525, 2.4),
    "128x160_c21": (0.465, 2.4),
    "128x128_c21": (0.375, 2.8),
    "128x96_c21": (0.305, 2.8),
    "128x64_c21": (0.235, 2.8),
    "128x128_c11_k2": (0.4, 7.0),
    "swapped_64x16_c11_b2": (0.2, 3.2),
    "swapped_64x16_c11_k2_b2": (0.2, 4.0),
    "swapped_64x32_c11_b2": (0.2, 3.3),
    "swapped_64x32_c11_k2_b2": (0.2, 4.1),
    "swapped_64x64_c11_b2": (0.24, 3.4),
    "swapped_64x64_c11": (0.22, 3.6),
    "swapped_64x64_c11_k2": (0.22, 4.2),
    "swapped_128x16_c21": (0.22, 3.6),
    "swapped_128x32_c21_b2": (0.24, 3.5),
}
# (n, k) -> (most rows, variant, tiles a group; for a variant of linear_small_m.cu: shares of k).
MEASURED: dict[tuple[int, int], list[tuple[int, str, int]]] = {
    (6144, 4096): [
        (4, "m8_deep", 1), (16, "swapped_64x16_c11_b2", 8), (32, "swapped_64x32_c11_b2", 8),
        (64, "swapped_64x64_c11", 8), (256, "128x96_c21", 8), (1024, "128x192_c21", 8),
    ],
    (4096, 4096): [
        (4, "m8_deep", 1), (16, "swapped_64x16_c11_k2_b2", 8), (32, "swapped_64x32_c11_k2_b2", 8),
        (64, "swapped_64x64_c11", 8), (256, "128x64_c21", 8), (512, "128x128_c21", 8),
        (8192, "128x256_c21", 8),
    ],
    (28672, 4096): [
        (4, "m8_deep", 1), (8, "swapped_128x16_c21", 8), (32, "swapped_128x32_c21_b2", 8),
        (64, "swapped_64x64_c11_b2", 8), (1024, "128x224_c21", 8), (4096, "128x320_c21", 8),
    ],
    (4096, 14336): [
        (4, "m8", 1), (16, "swapped_64x16_c11_k2_b2", 8), (32, "swapped_64x32_c11_k2_b2", 8),
        (64, "swapped_64x64_c11_k2", 8), (256, "128x128_c11_k2", 8), (512, "128x128_c21", 8),
        (8192, "128x256_c21", 8),
    ],
}  # fmt: skip
