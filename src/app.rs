//! Wires everything and owns every task.
