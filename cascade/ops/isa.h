// Which instruction set the kernels use: the best of the machine, or what STEPWELL_ISA names.
#pragma once

namespace stepwell {

// kAmxEmulated runs the AMX kernels' logic on AVX-512 machines; only tests ask for it.
enum class Isa { kPortable, kAvx2, kAvx512Vnni, kAmx, kAmxEmulated };

// Reads STEPWELL_ISA (portable | avx2 | avx512vnni | amx | amx-emulated) each time a kernel is created, so that one process can
// hold sessions of several. A name that the machine cannot run is an OpError naming what it can.
Isa choose_isa();
const char* isa_name(Isa isa);
bool isa_available(Isa isa);

}  // namespace stepwell
