"""What a person types. This module is the first of headrace's to run in a command: it keeps the time."""

import time

# time.monotonic() when the command began. The process's own start would be too early: a shell that runs a command as
# its last becomes it, and is as old as everything it did before.
BEGAN = time.monotonic()
