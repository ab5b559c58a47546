"""Operations on streams of ranks, played in order: pipeline schedules, traces of runs, pictures."""
