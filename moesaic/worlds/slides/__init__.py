"""Slides as HTML: laid out by a real browser, and judged by what is where on them (AeSlides)."""
