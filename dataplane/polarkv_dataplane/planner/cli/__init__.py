"""What the planner adds to `polarkv`: plan, simulate, calibrate. They need the extra ``planner``, no server."""

import importlib.util

# Said here, so that the command can say what to install.
for _name in ("yaml",):
    if importlib.util.find_spec(_name) is None:
        raise ModuleNotFoundError(f"{_name} is not installed", name=_name)
