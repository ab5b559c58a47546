"""What clients write a form in, translated to llguidance's own: one file for each way."""
