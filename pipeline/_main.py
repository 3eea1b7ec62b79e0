"""`python -m ckptpipe` is the command `ckptpipe`."""

from ckptpipe.pipeline.cli import main

if __name__ == "__main__":
    main()
