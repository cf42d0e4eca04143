/* long hw_clone3(struct hw_clone_args *args, unsigned long size, void (*fn)(void *), void *argument); see abi.h */
    .text
    .globl hw_clone3
#if defined(__x86_64__)
    .type hw_clone3, @function
hw_clone3:
    mov %rcx, %r8
    mov $435, %eax
    syscall
    test %rax, %rax
    jnz 1f
    xor %ebp, %ebp
    mov %r8, %rdi
    call *%rdx
    hlt
1:  ret
    .size hw_clone3, .-hw_clone3
#elif defined(__aarch64__)
    .type hw_clone3, %function
hw_clone3:
    mov x8, #435
    svc 0
    cbnz x0, 1f
    mov x29, #0
    mov x0, x3
    blr x2
    brk #0
1:  ret
    .size hw_clone3, .-hw_clone3
#endif
    .section .note.GNU-stack, "", %progbits
