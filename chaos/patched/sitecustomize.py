"""Python reads this before a process of a cluster without some of its fences does anything (see `chaos.fences`)."""

import os
import sys

if "CHAOS_WITHOUT" in os.environ:
    from chaos import fences

    if "tidegate.app" in sys.modules:  # Python itself would go on after an exception here
        sys.exit("chaos: the statements are loaded, so no fence can be taken out; what does chaos.fences import?")
    fences.take_out(os.environ["CHAOS_WITHOUT"].split(","))
