// What the parts of the machine share.  One machine per kernel library: the state is global.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"
#include "machine.h"
#include "races.h"

namespace emu {

constexpr uint64_t kBarrierMark = 0x6d62617272696572;  // what the bytes of an mbarrier hold
constexpr size_t kStackBytes = 256 << 10, kPage = 4096;
constexpr size_t kGuard = 64 << 20;  // on both sides of a tensor
constexpr uint32_t kSharedBase = 1024, kSharedBytes = 512 << 10;
constexpr uint32_t kGap = 256;  // unused bytes between allocations of shared memory
constexpr unsigned char kPoison = 0xff, kCanary = 0xa5;

enum class State { ready, waiting, exited };
enum class Wait { none, collective, named, mbarrier };

// Thrown where `fail` is called while no thread runs; the message is in the machine.
struct Failure {};

struct ThreadCopy {
  char* shared;
  const char* global;
  uint32_t bytes;
};

struct StoreCopy {
  TensorMap map;
  char* global = nullptr;  // of a copy without a tensor map
  const char* shared;
  uint32_t bytes = 0;
  int32_t coordinates[5];
  races::Operation operation;
};

struct LoadCopy {
  TensorMap map;
  const char* global = nullptr;
  char* shared;
  uint32_t barrier, bytes;
  int32_t coordinates[5];
  races::Operation operation;
};

struct Thread {
  Context context;
  Index index;
  State state;
  Wait wait = Wait::none;
  const char* what = "";  // the collective that it waits at, or the number of the barrier in `parity`
  uint32_t mask = 0, parity = 0, address = 0;
  void* arguments = nullptr;
  std::vector<ThreadCopy> open_copies;
  std::vector<std::vector<ThreadCopy>> copy_groups;
  std::vector<StoreCopy> open_stores;
  std::vector<std::vector<StoreCopy>> store_groups;
};

struct Issued {
  Product product;
  const uint32_t* registers[32];
  float* accumulators[32];
  races::Operation operation;
};

struct Warp {
  unsigned first, lanes;
  uint64_t priority;
  std::vector<Issued> products;     // not yet executed
  std::vector<size_t> open_groups;  // products of each committed group that was not waited for
  size_t uncommitted = 0, issued = 0;
  bool fenced = false;
};

struct Named {
  int count = 0, arrived = 0;
  races::Knowledge knowledge;
};

struct Mbarrier {
  uint32_t count, pending, phase;
  int64_t bytes;
  races::Knowledge gathered, released;  // by arrivals so far, and by those of completed phases
};

struct Allocation {
  std::string name;
  uint32_t address;
  size_t bytes;
};

struct Buffer {
  std::string name;
  char *outer, *data, *source;
  size_t outer_bytes, bytes;  // the outer bytes without the guards around them
};

// What a warp group's first warp to issue a product brought.
struct Signature {
  uint64_t a, b;
  int columns;
};

struct Machine {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<std::vector<Signature>> groups;
  Named named[16];
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<LoadCopy> loads;  // that have not landed
  std::map<int, Allocation> statics;
  Allocation dynamic;
  uint32_t next_static = 0;
  std::vector<Buffer> buffers;
  char* stacks = nullptr;
  size_t num_stacks = 0;
  char* shared = nullptr;

  Thread* current = nullptr;
  Context scheduler;
  std::mt19937_64 random;
  int eager_loads = 0, eager_products = 0, eager_stores = 0;  // one in so many is done at once; 0: none
  bool strict = false, poison_loads = false;
  bool interrogating = false;  // a thread that runs shall only say where it is
  std::string answer;
  int lane_order = 0;  // ascending, descending, or from any lane on
  std::string error;
  void (*kernel)(void**) = nullptr;
  void** arguments = nullptr;
};
extern Machine m;

std::string say(const char* text, ...) __attribute__((format(printf, 1, 2)));
// Code addresses for the Python side to name, as text: one, and those that led the running thread to where it is.
std::string code_text(const void* place);
std::string here();

inline Warp& this_warp() { return m.warps[(m.current - m.threads.data()) / 32]; }
inline unsigned this_lane() { return (m.current - m.threads.data()) % 32; }
inline unsigned this_thread() { return m.current - m.threads.data(); }
inline bool one_in(int n) { return n > 0 && m.random() % n == 0; }
inline char* raw(uint32_t address) { return m.shared + address; }
// Unit of 16 bytes of a swizzled tile: bits from 4 on are exchanged by those from 7 on.
inline uint32_t swizzled(uint32_t address, int bits) { return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4); }

void suspend();
void run_cta(size_t dynamic_bytes);
std::string shared_name(uint32_t address);
void land_any_load();
// Fails unless [pointer, pointer + bytes) lies in one tensor.
void check_tensor(const void* pointer, size_t bytes, const char* who);
void check_products();
void place(Buffer& buffer);
void take_back(Buffer& buffer);
void install_handlers();
void restore_handlers();

}  // namespace emu
