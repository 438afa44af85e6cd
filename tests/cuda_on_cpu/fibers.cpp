// The lanes of a warp as fibers.
#include <ucontext.h>

#include <cstdlib>
#include <limits>
#include <vector>

#include "cuda_runtime.h"

namespace fibers {

dim3 thread, block, block_size;
char* shared;

namespace {

constexpr int kLanes = 32;
constexpr size_t kStack = 1 << 17;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  bool done;
  int turn;  // which of the two tables it gives its next value to
};

Fiber warp[kLanes];
ucontext_t caller;
std::function<void()> body;
uint64_t table[2][kLanes];
int arrived[2];
int current;
unsigned first_thread;

void become(int lane) {
  current = lane;
  thread.x = first_thread + static_cast<unsigned>(lane);
}

void enter() {
  body();
  warp[current].done = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!warp[lane].done) {
      become(lane);
      setcontext(&warp[lane].context);
    }
  }
  setcontext(&caller);
}

}  // namespace

int lane() {
  return current;
}

const uint64_t* exchange(uint64_t mine) {
  const int self = current, turn = warp[self].turn;
  warp[self].turn = 1 - turn;
  table[turn][self] = mine;
  if (++arrived[turn] == kLanes)
    arrived[1 - turn] = 0;
  while (arrived[turn] < kLanes) {
    const int next = (self + 1) % kLanes;
    if (warp[next].done)
      std::abort();  // on a GPU the warp would hang
    become(next);
    swapcontext(&warp[self].context, &warp[next].context);
    become(self);
  }
  return table[turn];
}

void run(dim3 blocks, int threads, int shared_bytes, std::function<void()> kernel) {
  std::vector<float4> memory(static_cast<size_t>(shared_bytes) / sizeof(float4) + 1);
  shared = reinterpret_cast<char*>(memory.data());
  body = std::move(kernel);
  block_size = dim3(static_cast<unsigned>(threads));
  constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
  for (block.y = 0; block.y < blocks.y; ++block.y) {
    for (block.x = 0; block.x < blocks.x; ++block.x) {
      std::fill(memory.begin(), memory.end(), float4{kPoison, kPoison, kPoison, kPoison});
      for (first_thread = 0; first_thread < block_size.x; first_thread += kLanes) {
        arrived[0] = arrived[1] = 0;
        for (Fiber& fiber : warp) {
          fiber.done = false;
          fiber.turn = 0;
          getcontext(&fiber.context);
          fiber.context.uc_stack.ss_sp = fiber.stack.data();
          fiber.context.uc_stack.ss_size = fiber.stack.size();
          makecontext(&fiber.context, enter, 0);
        }
        become(0);
        swapcontext(&caller, &warp[0].context);
      }
    }
  }
}

}  // namespace fibers
