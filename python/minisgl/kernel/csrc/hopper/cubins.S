// Puts the compiled kernels into the library, for launch.cu. The assembler finds them in its include
// folders.
    .section .rodata
    .balign 64
    .global prompts_paged_cubin
    .hidden prompts_paged_cubin
prompts_paged_cubin:
    .incbin "paged.cubin"
    .balign 64
    .global prompts_ragged_cubin
    .hidden prompts_ragged_cubin
prompts_ragged_cubin:
    .incbin "ragged.cubin"
    .section .note.GNU-stack,"",@progbits
