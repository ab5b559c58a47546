"""A browser for agents: sites that are Python objects, shown in a real Chromium or as text that is rendered here."""
