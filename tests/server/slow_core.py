"""An engine core that does not finish its start while a test lasts."""

import time
from typing import Any


class SlowStart:
    def __init__(self, config: Any):
        print("the engine is starting", flush=True)
        time.sleep(120)
