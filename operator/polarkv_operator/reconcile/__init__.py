"""The operator's loop: observe, plan (pure), execute (the only writer), status."""
