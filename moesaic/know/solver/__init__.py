"""The logical-form solver (KAG, Liang et al.): a question as steps, executed one by one, each with its evidence.

solver = Solver(KnowledgeBase.open("kb"), EngineWriter.open("MODEL"))
print(solver.ask("Where was the teacher of Ada Lind born?"))

x1 = retrieve("Ada Lind", "teacher", ?)          graph: Ada Lind, teacher, Bo Ek (people/ada.md)
x2 = retrieve(x1, "birthplace", ?)               text: "Bo Ek was born in Morva." (people/bo.md)
output(x2)                                       Morva
"""
