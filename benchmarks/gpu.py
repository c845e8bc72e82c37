"""`make gpu`: the checks that need a CUDA device, as one script. It says what is missing and never pretends.

Today the runtime has no CUDA path: the ops' GPU cases (marker `gpu`) come with the Triton kernels. On a machine with a device this
script runs whatever cases there are, and fails while there are none.
"""

import subprocess
import sys

from benchmarks.report import ROOT

PYTEST_FOUND_NO_TEST = 5
NEEDS = "It needs an NVIDIA GPU (sm_90 or newer), its driver, and a CUDA build of torch (`make clean; make setup CONSTRAINTS=`)."


def main() -> int:
    """Run the GPU cases. Returns 0 only when there were some and all passed."""
    import torch

    if not torch.cuda.is_available():
        print(f"make gpu: no CUDA device is visible to torch {torch.__version__}. {NEEDS}", file=sys.stderr)
        return 1
    print(f"make gpu: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    code = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "tests/conformance"], cwd=ROOT, check=False).returncode
    if code == PYTEST_FOUND_NO_TEST:
        print("make gpu: the runtime does not support device='cuda' yet, so there is no GPU case to run.", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
