"""What this process may use of the machine: its device, its memory, its cores, its place among torchrun's processes."""
