"""`python -m apex.parallel.multiproc script.py args` started a process for each GPU; torchrun replaces it."""

import sys

if __name__ == "__main__":
    script = " ".join(sys.argv[1:]) or "script.py"
    sys.exit(
        f"apex.parallel.multiproc is replaced by torchrun.  Run torchrun --nproc_per_node=GPUS {script}; "
        "the script finds its GPU in the environment variable LOCAL_RANK, not in an argument --local_rank."
    )
