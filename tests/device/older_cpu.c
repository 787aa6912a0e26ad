// Loaded before a program (LD_PRELOAD), it makes the processor look like one without AVX-512 and AMX: torch, oneDNN and
// this library choose what they would choose there. Linux lets a process have its CPUID instruction fault
// (arch_prctl(2), ARCH_CPUID_SET; Intel processors since Ivy Bridge); the handler answers it with the features taken
// out. Whoever replaces the handler of SIGSEGV, as faulthandler does, ends that.
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { kArchCpuidSet = 0x1012 };

static long let_cpuid_fault(int faults) { return syscall(SYS_arch_prctl, kArchCpuidSet, !faults); }

// Bits of Intel's "Architecture Instruction Set Extensions Programming Reference", CPUID leaves 7, 0x1D and 0x1E.
static void take_out(unsigned leaf, unsigned subleaf, unsigned* eax, unsigned* ebx, unsigned* ecx, unsigned* edx) {
  if (leaf == 7 && subleaf == 0) {
    *ebx &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);  // AVX-512
    *ecx &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);                                     // AVX-512
    *edx &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);                // and AMX
  } else if (leaf == 7 && subleaf == 1) {
    *eax &= ~(1u << 4 | 1u << 5 | 1u << 21 | 1u << 23);
    *edx = 0;
  } else if (leaf == 0x1d || leaf == 0x1e) {
    *eax = *ebx = *ecx = *edx = 0;
  }
}

static void on_fault(int number, siginfo_t* info, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* instruction = (const unsigned char*)registers[REG_RIP];
  (void)info;
  if (instruction[0] != 0x0f || instruction[1] != 0xa2) {  // not CPUID: the program's own fault
    signal(number, SIG_DFL);
    return;
  }
  const unsigned leaf = (unsigned)registers[REG_RAX], subleaf = (unsigned)registers[REG_RCX];
  unsigned eax, ebx, ecx, edx;
  let_cpuid_fault(0);
  __cpuid_count(leaf, subleaf, eax, ebx, ecx, edx);
  let_cpuid_fault(1);
  take_out(leaf, subleaf, &eax, &ebx, &ecx, &edx);
  registers[REG_RAX] = eax;
  registers[REG_RBX] = ebx;
  registers[REG_RCX] = ecx;
  registers[REG_RDX] = edx;
  registers[REG_RIP] += 2;
}

__attribute__((constructor(101))) static void begin(void) {
  struct sigaction action = {0};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, 0);
  if (let_cpuid_fault(1) != 0) perror("older_cpu: this processor or kernel does not let CPUID fault");
}
