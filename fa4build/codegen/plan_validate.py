def validate_plan(plan, ptx, elf):
    return None
