"""llama.cpp's own API, as a translation: its requests become completions, and their outputs are written in its form."""
