"""As much of torch as tests/typing_calls.py names, so that its types are checked without torch."""

class dtype: ...  # noqa: N801

float32: dtype
bfloat16: dtype

class Tensor:
    def cuda(self) -> Tensor: ...

def zeros(*size: int, dtype: dtype = ...) -> Tensor: ...
