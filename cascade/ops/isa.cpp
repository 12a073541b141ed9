#include "isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "op.h"
#include "quant_linear.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace stepwell {
namespace {

#if defined(__x86_64__)

bool amx_permitted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  if ((d & kAmxTile) == 0 || (d & kAmxInt8) == 0) return false;
  // The kernel hands out the 8 KiB of tile state only on request.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool detect(Isa isa) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512Vnni:
      return vnni;
    case Isa::kAmx:
      return vnni && amx_permitted() && amx_agrees();
    case Isa::kAmxEmulated:
      return vnni;
  }
  return false;
}

#else

bool detect(Isa isa) { return isa == Isa::kPortable; }

#endif

constexpr Isa kBestFirst[] = {Isa::kAmx, Isa::kAvx512Vnni, Isa::kAvx2, Isa::kPortable, Isa::kAmxEmulated};

}  // namespace

bool isa_available(Isa isa) {
  static const bool available[] = {detect(Isa::kPortable), detect(Isa::kAvx2), detect(Isa::kAvx512Vnni), detect(Isa::kAmx),
                                   detect(Isa::kAmxEmulated)};
  return available[static_cast<int>(isa)];
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512Vnni:
      return "avx512vnni";
    case Isa::kAmx:
      return "amx";
    case Isa::kAmxEmulated:
      return "amx-emulated";
  }
  return "?";
}

Isa choose_isa() {
  const char* wanted = std::getenv("STEPWELL_ISA");
  std::string available;
  for (Isa isa : kBestFirst) {
    if (!isa_available(isa)) continue;
    if (wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, isa_name(isa)) == 0) return isa;
    available += (available.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  fail("STEPWELL_ISA=%s is not available on this machine; available: %s", wanted, available.c_str());
}

}  // namespace stepwell
