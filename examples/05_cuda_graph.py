"""CUDA graphs: load before the capture, replay after it; and bound launches, the quickest path."""

import sys

import torch

from kernel_hub import Kernel

kernel = Kernel("launch_probe")
print(kernel.launch_probe_5.signature)

if not torch.cuda.is_available():
    print("needs an NVIDIA GPU: torch.cuda.is_available() is False, so nothing was captured")
    sys.exit(0)

x, y = torch.randn(2, 4096, device="cuda")
out = torch.empty_like(x)
params = [out, x, y, x.numel(), 0.5]

# Loading inside a capture is refused: it would be recorded, or end the capture.
kernel.load()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kernel.launch_probe_5(16, 256, 0, None, params)

# The graph keeps addresses, not values: new values in x are what a replay sees.
x.copy_(torch.randn_like(x))
out.zero_()
graph.replay()
torch.testing.assert_close(out, x + 0.5 * y)
print("a replayed graph gave what torch gives")

# Everything is checked and packed once; a call is the launch alone, on torch's current stream.
bound = kernel.launch_probe_5.bind(16, 256, 0, None, params)
y.zero_()
out.zero_()
for _ in range(1000):
    bound()
torch.testing.assert_close(out, x)
print("1,000 bound launches gave what torch gives")
