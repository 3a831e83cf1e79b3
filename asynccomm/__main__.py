"""``python -m asynccomm``: the ``asynccomm`` command."""

import sys

from asynccomm.cli.main import main

sys.exit(main())
