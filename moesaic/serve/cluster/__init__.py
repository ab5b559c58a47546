"""Front and workers apart: engines in other processes and on other machines, behind one client."""
