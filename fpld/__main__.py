"""`python -m fpld` is `fpld`."""

import sys

from fpld.cli import main

sys.exit(main())
