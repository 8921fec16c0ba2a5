"""What the data plane adds to `polarkv`: up, down, and the servers that pods run."""

import importlib.util

# Said here, before anything is started: a manager that cannot be imported would end again and again.
for _name in ("fastapi", "prometheus_client", "uvicorn"):
    if importlib.util.find_spec(_name) is None:
        raise ModuleNotFoundError(f"{_name} is not installed", name=_name)
