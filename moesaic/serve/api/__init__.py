"""The engine over HTTP, in the forms OpenAI's clients speak."""
