"""What simulations found, as tables (JSON, CSV), plots (PNG) and one page (HTML)."""
