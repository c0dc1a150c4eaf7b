"""What `loralane serve --config FILE` does, with another program as the engine:

python -m tests.chaos.serve_process CONFIG DATA_DIR MODEL_DIR ENGINE...
"""

import os
import sys
from pathlib import Path

from rich.console import Console

from gateway.config.whole import load_config
from gateway.serve.launch import Launch
from gateway.serve.process import configure_logging, leave_torch_out, run_loop


def main() -> None:
    config, data_dir, model_dir = map(Path, sys.argv[1:4])
    launch = Launch(load_config(config, os.environ), model_dir, data_dir, tuple(sys.argv[4:]))
    leave_torch_out()
    if launch.config.gateways == 1:
        from gateway.serve.single import serve
    else:
        from gateway.serve.fleet import serve
    configure_logging()
    run_loop(serve(launch, Console(stderr=True)))


if __name__ == "__main__":
    main()
