// What the Python side calls.
#include <sys/mman.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <numeric>

#include "state.h"

extern "C" {

struct EmuBuffer {
  const char* name;
  void* data;
  uint64_t bytes;
};

// kind: 'p' pointer to a buffer, 'm' tensor map of a buffer, 'i' int32, 'l' int64, 'f' float.
struct EmuArgument {
  int32_t kind, buffer;
  int64_t integer;
  double real;
  emu::TensorMap map;
};

struct EmuLaunch {
  uint32_t grid[3], block[3];
  uint64_t dynamic_bytes, seed;
  int32_t flush_denormals, find_races, num_buffers, num_arguments, error_bytes, unused;
  const EmuBuffer* buffers;
  const EmuArgument* arguments;
  char* error;
};

void emu_kernel(void** arguments);

// 0; or, with messages in `error`, 1 if the run ended early and 2 if only races were found, one message a line.
__attribute__((visibility("default"))) int emu_run(const EmuLaunch* launch) {
  using namespace emu;
  m.error.clear();
  m.kernel = emu_kernel;
  m.random.seed(launch->seed * 0x9e3779b97f4a7c15ull + 1);
  for (int i = 0; i < 4; ++i) m.random();
  // Runs of a few seeds meet the extremes; seed 0 is everything late, seed 1 everything at once.
  const int choices[] = {0, 1, 2};
  auto choose = [&] { return launch->seed < 2 ? int(launch->seed) : choices[m.random() % 3]; };
  m.eager_loads = choose();
  m.eager_products = choose();
  m.eager_stores = choose();
  m.lane_order = launch->seed % 3;
  m.strict = launch->seed % 2 == 0;
  m.poison_loads = launch->seed % 4 == 2;
  races::start(launch->find_races);

  const size_t threads = size_t(launch->block[0]) * launch->block[1] * launch->block[2];
  if (m.num_stacks < threads) {
    if (m.stacks) munmap(m.stacks, m.num_stacks * kStackBytes);
    m.num_stacks = threads;
    m.stacks = static_cast<char*>(mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (size_t i = 0; i < threads; ++i) mprotect(m.stacks + i * kStackBytes, kPage, PROT_NONE);
  }
  if (!m.shared)
    m.shared =
        static_cast<char*>(mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));

  m.buffers.clear();
  for (int i = 0; i < launch->num_buffers; ++i) {
    const EmuBuffer& b = launch->buffers[i];
    m.buffers.push_back({b.name, nullptr, nullptr, static_cast<char*>(b.data), 0, b.bytes});
    place(m.buffers.back());
  }
  struct alignas(64) Value {
    char bytes[sizeof(TensorMap) + 64];
  };
  std::vector<Value> values(launch->num_arguments);
  std::vector<void*> pointers;
  for (int i = 0; i < launch->num_arguments; ++i) {
    const EmuArgument& a = launch->arguments[i];
    char* data = a.buffer >= 0 ? m.buffers[a.buffer].data : nullptr;
    TensorMap map = a.map;
    map.base = reinterpret_cast<uint64_t>(data);
    const int32_t narrow = a.integer;
    const float real = a.real;
    if (a.kind == 'p') std::memcpy(values[i].bytes, &data, sizeof data);
    if (a.kind == 'm') std::memcpy(values[i].bytes, &map, sizeof map);
    if (a.kind == 'i') std::memcpy(values[i].bytes, &narrow, sizeof narrow);
    if (a.kind == 'l') std::memcpy(values[i].bytes, &a.integer, sizeof a.integer);
    if (a.kind == 'f') std::memcpy(values[i].bytes, &real, sizeof real);
    pointers.push_back(values[i].bytes);
  }
  m.arguments = pointers.data();

  install_handlers();
#if defined(__x86_64__)
  const unsigned control = _mm_getcsr();
  if (launch->flush_denormals) _mm_setcsr(control | 0x8040u);
#endif
  blockDim = {launch->block[0], launch->block[1], launch->block[2]};
  gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
  // A grid promises no order of its CTAs: seed 1 runs the last one first, later seeds run them as they come.
  std::vector<uint64_t> order(uint64_t(gridDim.x) * gridDim.y * gridDim.z);
  std::iota(order.begin(), order.end(), 0);
  if (launch->seed == 1) std::reverse(order.begin(), order.end());
  if (launch->seed > 1) std::shuffle(order.begin(), order.end(), std::mt19937_64(launch->seed));
  for (uint64_t i : order) {
    if (!m.error.empty()) break;
    blockIdx = {unsigned(i % gridDim.x), unsigned(i / gridDim.x % gridDim.y), unsigned(i / gridDim.x / gridDim.y)};
    run_cta(launch->dynamic_bytes);
  }
#if defined(__x86_64__)
  _mm_setcsr(control);
#endif
  restore_handlers();
  for (Buffer& b : m.buffers) take_back(b);
  m.threads.clear();
  snprintf(launch->error, launch->error_bytes, "%s", (m.error + races::found()).c_str());
  return !m.error.empty() ? 1 : !races::found().empty() ? 2 : 0;
}
}
