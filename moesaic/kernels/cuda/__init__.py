"""Operations on a GPU: the fast ones, and those whose bits do not depend on the batch."""
