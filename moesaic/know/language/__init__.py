"""GraphQ IR (Nie et al.): one intermediate language between questions and queries of a graph.

    program = parse("what is <country> of <birthplace> of [Ada]")
    execute(program, Facts.of(graph.triples()))       # ["Norland"]
    to_sparql(program); to_cypher(program)            # the same query for other stores

It reads like English, so that a model writes it more easily than SPARQL; it has a grammar (`grammar.py`), so that a
model cannot write anything else; and it means the same in all places, which the tests hold against an RDF store.

    what is SET              <born> of [Ada]                                   objects of a relation
    how many are SET         those whose <employer> is [Acme]                  subjects of a relation
    is there any SET         those whose <population> above 5000               at least, at most, below; after, before
    compute NUMBER           ( SET and SET ), ( SET or SET ), ( SET but not SET )
    is NUMBER above NUMBER   ( SET with the largest <population> )             smallest; latest, earliest
                             ( SET named like "burg" ), everything
    NUMBER: 12, the number of SET, the sum <population> of SET (average, largest, smallest, latest year, earliest year),
            ( NUMBER minus NUMBER ) (plus, times, divided by)
    A relation may be qualified: <employer> where <since> above 1990 of [Ada]
"""
