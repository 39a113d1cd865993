"""A server and its client: a tiny random model by OpenAI's routes, asked whole and streamed.

`kernel-hub serve FOLDER` is the same for a model that has learnt something; `openai`'s clients take
its address as `base_url`.
"""

import importlib.util
import json
import subprocess
import sys
import urllib.request

from kernel_hub import KernelHubError, driver

try:
    driver.get().primary_context(0)
except KernelHubError as error:
    print(f"needs an NVIDIA GPU to be quick, goes on by the CPU: {error}")

for package in ("torch", "starlette", "uvicorn", "pydantic", "prometheus_client"):
    if importlib.util.find_spec(package) is None:
        print(f"needs {package}: pip install 'kernel_hub[serve]'")
        sys.exit(0)

server = subprocess.Popen(
    [sys.executable, "-m", "kernel_hub", "serve", "tiny", "--port", "0"],
    stdout=subprocess.PIPE, text=True,
)  # fmt: skip
try:
    said = server.stdout.readline()
    print(said, end="")
    address = next(word for word in said.split() if word.startswith("http")).rstrip(",")

    def ask(**more):
        """The lines of an answer to one prompt."""
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "seed": 1, **more}
        return urllib.request.urlopen(
            urllib.request.Request(
                f"{address}/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
        )

    whole = json.load(ask())
    print("whole:", repr(whole["choices"][0]["text"]), whole["usage"])

    pieces = []
    for line in ask(stream=True):
        if line.startswith(b"data: {"):
            pieces.append(json.loads(line[6:])["choices"][0]["text"])
    print("streamed:", pieces)
    assert "".join(pieces) == whole["choices"][0]["text"], "a seed says the same again"
finally:
    server.terminate()  # it answers what runs, then ends
    print("the server ended with", server.wait(timeout=60))
